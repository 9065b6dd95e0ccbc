"""Whether Echelon and its peer have made the same of the same records.

    python -m peers.prep_agree tfidf ECHELON PEER ROWS

Words, weights and figures are compared as a whole, rows as a sample. Splits are drawn by each side
for itself, so numbers of a table are compared as they were before they were standardised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from echelon.data.prepare.workdir import load

from .prep_raw import CATEGORIES

SAMPLED = 500
_NEAR = 1e-6


def main(job: str, echelon: Path, peer: Path, rows: int) -> None:
    splits = [folder.name for folder in echelon.iterdir() if (folder / "manifest.json").exists()]
    ids = np.sort(np.concatenate([_column(echelon, split, "id") for split in splits]))
    assert np.array_equal(ids, np.arange(rows)), "every record is there once"
    CHECKS[job](echelon, peer)


def tfidf(echelon: Path, peer: Path) -> None:
    learnt, words = load(echelon / "learnt/feature-0"), _json(peer / "words.json")
    terms = learnt["terms"].to_pylist()
    place = {word: at for at, word in enumerate(terms)}
    assert place.keys() == set(words), "the same words are kept"
    at = np.array([place[word] for word in words])
    np.testing.assert_allclose(learnt["idf"][at], np.load(peer / "idf.npy"), rtol=_NEAR, atol=_NEAR)
    matrix, ids = sp.load_npz(peer / "x.npz"), np.load(peer / "id.npy")
    where = np.argsort(ids)
    for number, row in _sampled(echelon, "train", ("id", "x", "label")):
        mine = np.zeros(len(terms))
        mine[[pair["index"] for pair in row["x"]]] = [pair["value"] for pair in row["x"]]
        other = matrix[where[number]].toarray()[0]
        np.testing.assert_allclose(mine[at], other, rtol=_NEAR, atol=_NEAR)
        assert row["label"] == np.load(peer / "y.npy", mmap_mode="r")[where[number]]


def vocabulary(echelon: Path, peer: Path) -> None:
    learnt, words = load(echelon / "learnt/feature-0"), _json(peer / "words.json")
    terms, scores = learnt["terms"].to_pylist(), np.load(peer / "scores.npy")
    assert len(terms) == len(words)
    last = {w for w, score in zip(words, scores, strict=True) if score <= scores[-1] * (1 + 1e-9)}
    assert set(words) - set(terms) <= last, "all but the last, which are worth the same, are chosen"
    both = set(words) & set(terms)
    mine, others = (
        ["", "?", *(word if word in both else "?" for word in side)] for side in (terms, words)
    )
    ids, matrix = np.load(peer / "id.npy"), np.load(peer / "x.npy", mmap_mode="r")
    where = np.argsort(ids)
    for number, row in _sampled(echelon, "train", ("id", "x")):
        other = matrix[where[number]].tolist()
        assert [mine[at] for at in row["x"]] == [others[at] for at in other], number


def table(echelon: Path, peer: Path) -> None:
    scale, kinds = load(echelon / "learnt/feature-0"), load(echelon / "learnt/feature-1")
    mean, deviation = np.load(peer / "mean.npy"), np.load(peer / "deviation.npy")
    np.testing.assert_allclose(scale["mean"], mean, rtol=0.02)
    np.testing.assert_allclose(scale["std"], deviation, rtol=0.02)
    names: list[str | None] = []
    for at in range(len(CATEGORIES)):
        names += [*kinds[f"categories {at}"].to_pylist(), *([None] if kinds["missing"][at] else [])]
    theirs = _their_rows(peer)
    for split in ("train", "test"):
        for number, row in _sampled(echelon, split, ("id", "numbers", "categories")):
            scaled, categories = theirs[number]
            mine = np.array(row["numbers"])
            assert np.array_equal(mine == 0, scaled == 0), "the same numbers are missing"
            here, there = mine * scale["std"] + scale["mean"], scaled * deviation + mean
            same = (mine == 0) | np.isclose(here, there, _NEAR, _NEAR * deviation)
            assert same.all(), (number, here, there)
            # An empty cell is an empty text here, and no category there.
            assert [names[pair["index"]] or None for pair in row["categories"]] == categories


def _their_rows(peer: Path) -> dict[int, tuple[Any, list[str | None]]]:
    names = [name for column in _json(peer / "categories.json") for name in column]
    found = {}
    for split in ("train", "test"):
        ids = np.load(peer / f"{split}-id.npy")
        numbers = np.load(peer / f"{split}-numbers.npy", mmap_mode="r")
        categories = sp.load_npz(peer / f"{split}-categories.npz")
        for at in np.flatnonzero(ids < SAMPLED).tolist():
            chosen = [names[code] for code in categories[at].indices]
            found[int(ids[at])] = numbers[at].astype(np.float64), chosen
    return found


def _shards(echelon: Path, split: str) -> Iterator[Any]:
    for path in sorted((echelon / split).glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            yield pa.ipc.open_file(source).read_all()


def _column(echelon: Path, split: str, name: str) -> Any:
    return np.concatenate([shard[name].to_numpy() for shard in _shards(echelon, split)])


def _sampled(echelon: Path, split: str, names: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """The records of the smallest numbers."""
    for shard in _shards(echelon, split):
        rows = np.flatnonzero(shard["id"].to_numpy() < SAMPLED)
        some = shard.select(names).take(pa.array(rows))
        for row in some.to_pylist():
            yield row["id"], row


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    "tfidf": tfidf,
    "vocabulary": vocabulary,
    "csv": table,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
