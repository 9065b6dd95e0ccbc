"""Large raw files made of small real ones: the same records again and again, with seeded edits."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.random import Generator

NUMBERS = (
    "age",
    "fnlwgt",
    "education_num",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
)
CATEGORIES = (
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native_country",
)
_EDITED = 0.03
"""The part of all words that is edited."""
_TAKEN = 0.05
"""The part of all categories that is taken from another record."""
_MISSING = 0.02
"""The part of all cells that is emptied."""
_MB = 1 << 20


def write_text(data: Path, path: Path, megabytes: int, seed: int) -> None:
    """Film reviews as a tsv: id, label, text. Words are replaced by others, written twice, change
    places with their neighbours, or have two letters exchanged: so new ones go on coming."""
    reviews = [*_reviews(data / "imdb/train.tsv.xz"), *_reviews(data / "imdb/test.tsv.xz")]
    aside = path.with_suffix(".part")
    left, number, copy = megabytes * _MB, 0, 0
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        file.write("id\tlabel\ttext\n")
        while left > 0:
            for label, text in _edited(reviews, np.random.default_rng([seed, copy])):
                line = f"{number}\t{label}\t{text}\n"
                file.write(line)
                left -= len(line)
                number += 1
                if left <= 0:
                    break
            copy += 1
    aside.rename(path)


def _reviews(path: Path) -> Iterator[tuple[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        next(file)
        for line in file:
            label, _, _, text = line.rstrip("\n").split("\t")
            yield label, text


def _edited(reviews: list[tuple[str, str]], random: Generator) -> Iterator[tuple[str, str]]:
    """All of them in another order, each changed in some places."""
    pool: list[str] = []
    for row in random.permutation(len(reviews)).tolist():
        label, text = reviews[row]
        words = text.split(" ")
        places = random.random(math.ceil(len(words) * _EDITED)) * len(words)
        for at, kind in zip(places.astype(int).tolist(), _kinds(random, len(places)), strict=True):
            _edit(words, at, kind, pool)
        pool = words if len(words) > 100 else pool or words
        yield label, " ".join(words)


def _kinds(random: Generator, count: int) -> list[float]:
    found: list[float] = random.random(count).tolist()
    return found


def _edit(words: list[str], at: int, kind: float, pool: list[str]) -> None:
    word = words[at]
    if kind < 0.25 and pool:
        words[at] = pool[int(kind * 4 * len(pool))]
    elif kind < 0.5 and pool:
        words.insert(at, pool[int((kind * 4 - 1) * len(pool)) % len(pool)])
    elif kind < 0.75 and at:
        words[at - 1], words[at] = word, words[at - 1]
    elif len(word) > 3:
        middle = 1 + int((kind * 4 - 3) * (len(word) - 2)) % (len(word) - 2)
        words[at] = word[:middle] + word[middle + 1] + word[middle] + word[middle + 2 :]


def write_table(data: Path, path: Path, megabytes: int, seed: int) -> None:
    """Census records as a csv: id, six numbers, eight categories, label. Numbers are moved a
    little, categories taken from another record, cells emptied."""
    frame = _census(data)
    aside = path.with_suffix(".part")
    number = copy = 0
    with aside.open("wb") as file:
        while file.tell() < megabytes * _MB:
            part = _changed(frame, number, np.random.default_rng([seed, copy]))
            if not copy:
                file.write(",".join(part.column_names).encode() + b"\n")
            options = pa_csv.WriteOptions(include_header=False, quoting_style="none")
            pa_csv.write_csv(part, file, options)
            number += part.num_rows
            copy += 1
    aside.rename(path)


def _census(data: Path) -> Any:
    parts = []
    for name in ("train", "test"):
        with gzip.open(data / f"adult/{name}.csv.gz") as file:
            parts.append(pa_csv.read_csv(file))
    return pa.concat_tables(parts).combine_chunks()


def _changed(frame: Any, first: int, random: Generator) -> Any:
    rows = frame.num_rows
    frame = frame.take(pa.array(random.permutation(rows)))
    columns: dict[str, Any] = {"id": pa.array(np.arange(first, first + rows))}
    for name in NUMBERS:
        values = frame[name].to_numpy()
        moved = values + np.rint(values * random.normal(0, 0.02, rows)).astype(np.int64)
        columns[name] = pa.array(moved, mask=random.random(rows) < _MISSING)
    for name in CATEGORIES:
        other = np.where(
            random.random(rows) < 0.05, random.integers(0, rows, rows), np.arange(rows)
        )
        values = frame[name].combine_chunks().take(pa.array(other)).to_numpy(zero_copy_only=False)
        columns[name] = pa.array(values, pa.utf8(), mask=random.random(rows) < _MISSING)
    columns["label"] = frame["label"]
    return pa.table(columns)
