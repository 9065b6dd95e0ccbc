"""Which parts lie at a path: a file, the files of a folder, or train, valid and test."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError
from echelon.data.readers import FORMATS, detect, read
from echelon.data.readers.detect import format_of_name
from echelon.data.readers.idx import labels_beside
from echelon.data.readers.npy import names_in
from echelon.data.readers.stream import plain_name
from echelon.data.sets import USUAL, shard_sets
from echelon.data.shards.manifest import MANIFEST

_SPLITS = (*USUAL, "training", "validation", "val", "dev", "testing", "eval")
_ORDER = ("tr", "va", "de", "te", "ev")
_NOT_DATA = re.compile(
    r"^\.|^readme|^license|\.md$|\.json$|\.ya?ml$|^(quarantine|labels|classes)\."
)
_BLOCK = 8 << 20
"""Arrow reads up to 32 blocks ahead of who looks at them: small ones keep memory flat."""
_BY_BLOCK = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """Files that are read one after the other as one part."""

    name: str
    paths: tuple[Path, ...]
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def batches(self) -> Generator[tuple[str, Any]]:
        """Record batches, each with the file it comes from."""
        block = {"block": _BLOCK} if self.format in _BY_BLOCK else {}
        for path in self.paths:
            for batch in read(path, self.format, **{**block, **self.options}):
                yield str(path), batch

    def files(self) -> list[Path]:
        """All files that are read, also those beside the ones that were named."""
        found = [file for path in self.paths for file in _files_in(path)]
        if self.format == "idx":
            labels = [labels_beside(path) for path in self.paths]
            found += [path for path in labels if path is not None]
        return found


def sources(path: Path, format: str, options: Mapping[str, Any]) -> list[Source]:
    """The parts at `path`; `options` go to the reader of each."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_file():
        return _of_file(path, format, options)
    found = _of_sets(path, format) or _of_splits(path, format) or _of_files(path, format)
    if not found:
        found = [Source("", (path,), detect(path) if format == "auto" else format)]
    return [Source(s.name, s.paths, s.format, {**s.options, **options}) for s in found]


def _of_file(path: Path, format: str, options: Mapping[str, Any]) -> list[Source]:
    if format == "auto":
        format = detect(path)
    if path.suffix == ".npz" and format == "numpy" and "part" not in options:
        ends = dict.fromkeys(name.rpartition("_")[2] for name in names_in(path))
        if ends and ends.keys() <= set(_SPLITS):
            return [Source(end, (path,), format, {"part": end, **options}) for end in ends]
    return [Source("", (path,), format, options)]


def _of_sets(path: Path, format: str) -> list[Source]:
    if format not in ("auto", "shards"):
        return []
    if not (path / MANIFEST).exists() and not any(path.glob(f"[!.]*/{MANIFEST}")):
        return []
    return [Source(name, (folder,), "shards") for name, folder in shard_sets(path).items()]


def _of_splits(path: Path, format: str) -> list[Source]:
    """Folders called train, test and the like; one alone may be a class of that name."""
    folders = [entry for entry in sorted(path.iterdir()) if entry.is_dir()]
    splits = [folder for folder in folders if folder.name.lower() in _SPLITS]
    if len(splits) < 2:
        return []
    return [
        Source("/".join(filter(None, (folder.name, inner.name))), inner.paths, inner.format)
        for folder in sorted(splits, key=lambda folder: _place(folder.name))
        for inner in sources(folder, format, {})
    ]


def _of_files(path: Path, format: str) -> list[Source]:
    """Files that differ in nothing but a number are one part."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in sorted(path.iterdir()):
        kind = format_of_name(file) if format == "auto" else format
        if not file.is_file() or _NOT_DATA.search(file.name.lower()) or kind not in FORMATS:
            continue
        if kind == "images" or (kind == "idx" and "labels" in file.name):
            continue
        groups.setdefault((re.sub(r"\d+", "#", plain_name(file)), kind), []).append(file)
    if all(kind == "text" for _, kind in groups) and sum(map(len, groups.values())) > 1:
        return []  # a folder of documents
    single = len(groups) == 1
    return [
        Source("" if single else files[0].name, tuple(files), kind)
        for (name, kind), files in sorted(groups.items(), key=lambda group: _place(group[0][0]))
    ]


def _place(name: str) -> tuple[int, str]:
    """What is for training comes first, what is for the end last."""
    words = re.split(r"[^a-z]+", name.lower())
    places = [_ORDER.index(word[:2]) for word in words if word in _SPLITS]
    return (places[0] if places else len(_ORDER), name)


def _files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
