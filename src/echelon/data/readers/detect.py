"""Which format a file or a folder has, by its name and what lies in it."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.core.errors import DataError
from echelon.data.readers import documents, images, libsvm
from echelon.data.readers.stream import plain_name
from echelon.data.shards.manifest import MANIFEST

_BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "numpy",
    ".npz": "numpy",
    ".idx": "idx",
    **dict.fromkeys(libsvm.SUFFIXES, "libsvm"),
    **dict.fromkeys(documents.SUFFIXES, "text"),
}
_IDX = re.compile(r"idx\d-u?byte$")


def detect(path: Path) -> str:
    """The format of a file by its suffix, of a folder by its content."""
    found = _of_folder(path) if path.is_dir() else format_of_name(path)
    if found is None:
        known = ", ".join(_BY_SUFFIX)
        raise DataError(
            f"{path}: its format cannot be told from its "
            f"{'content' if path.is_dir() else 'name'}; set format (known: {known}, "
            f"folders of shards, images or texts)"
        )
    return found


def format_of_name(path: Path) -> str | None:
    name = plain_name(path)
    if _IDX.search(name):
        return "idx"
    return _BY_SUFFIX.get(Path(name).suffix)


def _of_folder(path: Path) -> str | None:
    if (path / MANIFEST).is_file():
        return "shards"
    entries = sorted(path.iterdir())
    inner = [file for entry in entries if entry.is_dir() for file in entry.iterdir()]
    for files in ([entry for entry in entries if entry.is_file()], inner):
        if any(file.suffix.lower() in images.SUFFIXES for file in files):
            return "images"
        if any(plain_name(file).endswith(documents.SUFFIXES) for file in files):
            return "text"
    return None
