"""How fast raw files become training data, next to scikit-learn and pandas, and in how much memory.

    tfidf       1 GB of film reviews → words, 1 + log(count), idf, sparse rows of length 1
    vocabulary  the same → the 20,000 words that say most by chi², 256 numbers of words per text
    csv         2 GB of census records → numbers standardised, missing ones their mean, categories
                as sparse columns, a test split

`echelon data prepare` with two workers against the same in one process, each side as a command of
its own, imports and all; from reading the raw file to the last byte written. Then what both have
made is compared. Echelon also prepares files of twice the size: memory must not grow with them.
The last line is one JSON object; ratios are rows per second of Echelon ÷ those of the peer.

    python benchmarks/prepare.py --work /tmp/prepare
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.prep_raw import CATEGORIES, NUMBERS, write_table, write_text
from peers.prep_tree import Spent, run

SEED, DEADLINE = 0, 3600.0
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NEEDED = ("pandas", "sklearn", "scipy")
WORDS = {"from": "text", "to": "x", "by": "regex", "pattern": r"(?u)\b\w\w+\b"}
CHOSEN = {"size": 20_000, "choose": "chi2", "label": "label"}
FEATURES: dict[str, list[dict[str, Any]]] = {
    "tfidf": [
        {"kind": "tfidf", **WORDS, "sublinear": True, "vocabulary": {"size": None, "min_texts": 2}}
    ],
    "vocabulary": [{"kind": "tokens", **WORDS, "vocabulary": CHOSEN, "length": 256}],
    "csv": [
        {"kind": "standardise", "from": NUMBERS, "to": "numbers"},
        {"kind": "one_hot", "from": CATEGORIES, "to": "categories"},
    ],
}


@dataclass(frozen=True, slots=True)
class Raw:
    """A file to prepare."""

    path: Path
    rows: int


def main() -> None:
    chosen = arguments()
    with working_folder(chosen.work) as work:
        has_peers = all(importlib.util.find_spec(name) for name in NEEDED)
        if not has_peers:
            print("pandas or scikit-learn is not installed: no ratios", file=sys.stderr)
        ratios: dict[str, float | None] = {}
        peaks, doubled = [0.0], [0.0]
        for job in chosen.only:
            raw = raw_file(job, chosen, work, 1)
            spent = compare(job, raw, work, chosen, has_peers)
            ratios[job] = ratio(spent)
            peaks += [one.peak_mb for one in spent["echelon"]]
            if chosen.double:
                raw = raw_file(job, chosen, work, 2)
                doubled.append(echelon(job, raw, work, chosen.workers, "twice").peak_mb)
                if job != "tfidf":  # the next job reads the same
                    raw.path.unlink()
    found: dict[str, float | None] = {job: ratios.get(job) for job in FEATURES}
    found["peak_mb"] = round(max(peaks), 1)
    found["peak_mb_double"] = round(max(doubled), 1) if chosen.double else None
    print(json.dumps(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="where imdb and adult are")
    parser.add_argument("--work", type=Path, help="folder for files, kept (about 25 GB at most)")
    parser.add_argument("--text-mb", type=int, default=1024)
    parser.add_argument("--csv-mb", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--double", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


@contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="echelon-prepare-") as folder:
        yield Path(folder)


def raw_file(job: str, chosen: argparse.Namespace, work: Path, times: int) -> Raw:
    """Made if it is not there; read once, so that no side finds it colder than the other."""
    table = job == "csv"
    size = (chosen.csv_mb if table else chosen.text_mb) * times
    path = work / (f"table-{size}.csv" if table else f"text-{size}.tsv")
    if not path.exists():
        print(f"writing {path.name}", file=sys.stderr)
        (write_table if table else write_text)(chosen.data, path, size, SEED)
    lines = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            lines += block.count(b"\n")
    return Raw(path, lines - 1)


def compare(
    job: str, raw: Raw, work: Path, chosen: argparse.Namespace, has_peers: bool
) -> dict[str, list[Spent]]:
    """Rounds of both sides, who begins taking turns."""
    spent: dict[str, list[Spent]] = {"echelon": [], "peer": []}
    for number in range(chosen.rounds):
        sides = ["echelon", "peer"] if has_peers else ["echelon"]
        for side in sides[:: -1 if number % 2 else 1]:
            if side == "echelon":
                spent[side].append(echelon(job, raw, work, chosen.workers, "once"))
            else:
                spent[side].append(peer(job, raw, work))
        if has_peers and not number:
            agree(job, raw, work)
    return spent


def ratio(spent: dict[str, list[Spent]]) -> float | None:
    if not spent["peer"]:
        return None
    pairs = zip(spent["echelon"], spent["peer"], strict=True)
    return round(statistics.median(peer.seconds / mine.seconds for mine, peer in pairs), 3)


def echelon(job: str, raw: Raw, work: Path, workers: int, label: str) -> Spent:
    folder = fresh(work / f"echelon-{job}")
    recipe = {
        "read": str(raw.path),
        "features": FEATURES[job],
        "keep": ["label", "id"],
        "write": {"folder": "out"},
    }
    if job == "csv":
        recipe["split"] = {"by": "ratio", "train": 0.9, "test": 0.1}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = ["data", "prepare", "recipe.yaml", "--workers", str(workers)]
    spent = run([sys.executable, "-m", "echelon", *command], folder, DEADLINE)
    tell(job, f"echelon, {label}", raw, spent)
    if label == "twice":
        shutil.rmtree(folder)
    return spent


def peer(job: str, raw: Raw, work: Path) -> Spent:
    folder = fresh(work / f"peer-{job}")
    spent = run(module("peers.prep_sides", job, str(raw.path), str(folder)), folder, DEADLINE)
    tell(job, "peer", raw, spent)
    return spent


def agree(job: str, raw: Raw, work: Path) -> None:
    ours, other = work / f"echelon-{job}" / "out", work / f"peer-{job}"
    run(module("peers.prep_agree", job, str(ours), str(other), str(raw.rows)), other, DEADLINE)
    shutil.rmtree(other)


def module(name: str, *given: str) -> list[str]:
    here = str(Path(__file__).resolve().parent)
    code = f"import runpy, sys; sys.path.insert(0, {here!r}); "
    code += f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, *given]


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def tell(job: str, side: str, raw: Raw, spent: Spent) -> None:
    print(
        f"{job:10}  {side:14}  {raw.rows:>12,} rows  {spent.seconds:8.1f} s  "
        f"{raw.rows / spent.seconds:>10,.0f} rows/s  cpu {spent.cpu:7.1f} s  "
        f"peak {spent.peak_mb:8.1f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
