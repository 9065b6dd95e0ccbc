"""Six prepared folders: tables, two kinds of text, images, several formats, cross-validation.

The inputs are made from a seed with integer arithmetic, so that they are the same everywhere.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from echelon.data.prepare import Prepared, engine, prepare, write
from echelon.data.shards import ShardSource

from .numerics import digest

ROWS = 600
CHINESE = "今天天气很好我们去公园玩电影不错价格便宜服务态度差房间干净新闻体育财经科技"
RECIPES: dict[str, dict[str, Any]] = {
    "table": {
        "read": "table.csv",
        "clean": [
            {"kind": "types", "column": "hours", "to": "float64", "how": "missing"},
            {"kind": "missing", "column": "age", "how": "median", "indicator": True},
            {"kind": "range", "column": "hours", "min": 0, "max": 90, "how": "clip"},
            {"kind": "duplicates"},
        ],
        "split": {"by": "stratified", "column": "label", "train": 0.7, "valid": 0.1, "test": 0.2},
        "balance": {"column": "label", "how": "weight"},
        "features": [
            {"kind": "standardise", "from": ["age", "hours"], "to": "_numbers"},
            {"kind": "min_max", "from": "hours", "to": "_scaled"},
            {"kind": "bins", "from": "age", "to": "binned", "bins": 4},
            {"kind": "one_hot", "from": ["town", "work"], "to": "_categories"},
            {"kind": "cross", "from": ["town", "work"], "to": "crossed", "buckets": 32},
            {"kind": "target", "from": "town", "label": "label", "of": "class", "to": "_mean"},
            {"kind": "join", "from": ["_numbers", "_scaled", "_categories", "_mean"], "to": "_all"},
            {"kind": "pca", "from": "_numbers", "to": "components", "components": 2},
            {"kind": "select", "from": "_all", "to": "x", "label": "label", "size": 6},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "keep": ["id", "town"],
        "write": {"folder": "prepared", "shards": 3},
    },
    "tokens": {
        "read": [{"path": "train.tsv.gz", "split": "train"}, {"path": "test.tsv", "split": "test"}],
        "clean": [
            {"kind": "text", "column": "text", "html": True, "unicode": "NFKC", "lower": True},
            {"kind": "length", "column": "text", "min": 5},
            {"kind": "duplicates", "columns": ["text"], "near": 0.9},
            {"kind": "noise", "label": "label", "column": "text"},
        ],
        "features": [
            {
                "kind": "tokens",
                "from": "text",
                "to": "x",
                "by": "words",
                "vocabulary": {"size": 60, "at_least": 2, "choose": "chi2", "label": "label"},
                "length": 8,
            },
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "write": {"folder": "prepared", "shards": 2},
    },
    "tf-idf": {
        "read": "train.tsv.gz",
        "split": {"by": "ratio", "train": 0.8, "valid": 0.2},
        "features": [
            {"kind": "tfidf", "from": "text", "to": "_words", "ngrams": 2, "sublinear": True},
            {"kind": "hashed_text", "from": "text", "to": "_hashed", "width": 64},
            {"kind": "join", "from": ["_words", "_hashed"], "to": "x"},
            {"kind": "svd", "from": "_words", "to": "topics", "components": 4},
            {"kind": "word2vec", "from": "text", "to": "_vectors", "width": 4, "epochs": 1},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "write": {"folder": "prepared", "rows": 200},
    },
    "chinese": {
        "read": "chinese.jsonl",
        "split": {"by": "group", "column": "user", "train": 0.8, "test": 0.2},
        "features": [
            {
                "kind": "tokens",
                "from": "text",
                "to": "x",
                "by": "characters",
                "vocabulary": {"size": 200},
                "length": 12,
                "pad": False,
            },
            {"kind": "bag", "from": "text", "to": "bag", "by": "jieba"},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "keep": ["user"],
        "write": {"folder": "prepared", "shards": 2},
    },
    "images": {
        "read": "images/",
        "split": {"by": "stratified", "column": "label", "train": 0.8, "valid": 0.2},
        "balance": {"column": "label", "how": "resample"},
        "features": [
            {"kind": "image", "from": "image", "to": "x", "size": [8, 8], "fit": "crop"},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "write": {"folder": "prepared", "shards": 2},
    },
    "formats": {
        "read": [
            {"path": "part.parquet"},
            {"path": "part.jsonl"},
            {"path": "part.csv", "missing": ["", "?"]},
        ],
        "split": {"by": "stratified", "column": "label", "folds": 5, "fold": 1, "valid": 0.1},
        "clean": [{"kind": "missing", "column": "value", "how": "mean"}],
        "features": [
            {"kind": "hashed", "from": "name", "to": "bucket", "buckets": 50},
            {"kind": "standardise", "from": "value", "to": "x"},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "keep": ["value"],
        "write": {"folder": "prepared", "shards": 3},
    },
}


def use_small_blocks(set_value: Callable[[Any, str, Any], None]) -> None:
    """Cut the little data into several blocks and stretches of a shard."""
    set_value(engine, "SIZE", 4096)
    set_value(write, "WINDOW", 2048)


def made(name: str, folder: Path) -> dict[str, Any]:
    """Prepare one folder from fresh inputs in the current folder; describe what was written."""
    _write_inputs(folder)
    return described(prepare(RECIPES[name], workers=1))


def described(done: Prepared) -> dict[str, Any]:
    """Hashes of all files, of all records as they are read back, and the counts."""
    files = sorted(path for path in done.folder.rglob("*") if path.is_file())
    splits = sorted(path.parent.name for path in done.folder.glob("*/manifest.json"))
    return {
        "files": {
            str(path.relative_to(done.folder)): digest([path.read_bytes()])[:16]
            for path in files
            if path.name != "prepared.json"  # has the times of the input files
        },
        "records": {split: digest(_records(done.path(split))) for split in splits},
        "counts": {split: len(ShardSource(done.path(split))) for split in splits},
        "quarantined": _lines(done.folder / "quarantine.jsonl"),
    }


def _records(folder: Path) -> Iterator[bytes]:
    source = ShardSource(folder)
    for name, column in sorted(source.gather(torch.arange(len(source))).items()):
        yield name.encode()
        yield from _column_bytes(column)


def _column_bytes(column: Any) -> Iterator[bytes]:
    if isinstance(column, torch.Tensor) and column.layout is torch.strided:
        yield column.contiguous().numpy().tobytes()
    elif isinstance(column, torch.Tensor):
        yield from _column_bytes(column.to_dense())
    elif isinstance(column, dict):
        for key, value in sorted(column.items()):
            yield key.encode()
            yield from _column_bytes(value)
    elif isinstance(column, tuple | list):
        for value in column:
            yield from _column_bytes(value)
    else:
        yield repr(column).encode()


def _lines(path: Path) -> list[str]:
    """File, line and step of every quarantined record; reasons may be worded anew."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{Path(row['file']).name}:{row.get('line')} {row['step']}" for row in rows]


def _write_inputs(folder: Path) -> None:
    draw = np.random.default_rng(11)
    _write_table(folder / "table.csv", draw)
    for name, opened in (("train.tsv.gz", gzip.open), ("test.tsv", open)):
        with opened(folder / name, "wt", encoding="utf-8") as file:
            file.write("label\ttext\n")
            for i in range(ROWS):
                label = ("sport", "money", "film")[i % 3]
                count = 0 if i % 97 == 0 else int(draw.integers(4, 14))
                words = [f"{label[: 2 + w % 3]}{w * w % 41}" for w in draw.integers(0, 60, count)]
                file.write(f"{label}\t<b>{' '.join(words)}</b>\n")
    with (folder / "chinese.jsonl").open("w", encoding="utf-8") as file:
        for i in range(ROWS):
            chosen = draw.integers(0, len(CHINESE), 4 + i % 20)
            row = {"text": "".join(CHINESE[c] for c in chosen), "label": i % 4, "user": i // 7}
            file.write("{broken\n" if i == 50 else json.dumps(row, ensure_ascii=False) + "\n")
    _write_images(folder / "images", draw)
    _write_parts(folder, draw)


def _write_table(path: Path, draw: np.random.Generator) -> None:
    lines = ["id,label,age,hours,town,work"]
    for i in range(ROWS):
        age = "" if i % 23 == 0 else int(draw.integers(16, 90))
        hours = "many" if i == 300 else int(draw.integers(-5, 120))
        town, work = f"town{draw.integers(0, 9)}", f"work{draw.integers(0, 4)}"
        lines.append(f"{i},{'yes' if i % 4 == 0 else 'no'},{age},{hours},{town},{work}")
    lines.insert(40, lines[39])  # a duplicate
    lines.insert(80, "too,short")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_images(folder: Path, draw: np.random.Generator) -> None:
    for i in range(60):
        name = "cat" if i % 3 else "dog"
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (9 + i % 4, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{i:03d}.png")
    (folder / "cat" / "broken.png").write_bytes(b"not an image")


def _write_parts(folder: Path, draw: np.random.Generator) -> None:
    rows = [
        {"name": f"n{draw.integers(0, 99)}", "value": float(draw.integers(0, 1000)), "label": i % 3}
        for i in range(ROWS)
    ]
    third = ROWS // 3
    pq.write_table(pa.Table.from_pylist(rows[:third]), folder / "part.parquet")
    lines = [json.dumps(row) for row in rows[third : 2 * third]]
    (folder / "part.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    cells = [
        f"{row['name']},{'?' if i % 9 == 0 else row['value']},{row['label']}"
        for i, row in enumerate(rows[2 * third :])
    ]
    (folder / "part.csv").write_text("\n".join(["name,value,label", *cells]) + "\n")
