"""Where the training part and the held-out part of a data set lie.

A folder may hold them as files or sub-folders named train… and valid…, dev… or test…, as one
.npz of arrays x_train, x_test, …, or as a single set that is split later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from echelon.core.errors import DataError
from echelon.data.readers.detect import detect, format_of_name
from echelon.data.readers.npy import names_in
from echelon.data.readers.stream import plain_name
from echelon.data.shards.manifest import MANIFEST

Recognise: TypeAlias = Callable[[Path], str | None]
_TRAIN = ("train", "training")
# The first of these that is there is held out: test comes last, it is for the very end.
_HELD_OUT = ("valid", "validation", "val", "dev", "test", "testing", "t10k", "eval")
_NOT_DATA = re.compile(r"^\.|^readme|^license|^(labels|classes)\.|\.md$|\.json$|\.ya?ml$")


@dataclass(frozen=True, slots=True)
class Part:
    """Files that are read one after the other."""

    paths: tuple[Path, ...]
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0]} and the next"


@dataclass(frozen=True, slots=True)
class Parts:
    train: Part
    valid: Part | None = None
    held_out: str = ""
    """What the held-out part is called: valid, test, …"""


def find_parts(
    path: str,
    valid_path: str | None = None,
    format: str = "auto",
    *,
    recognise: Recognise = format_of_name,
    one_text: bool = False,
) -> Parts:
    """The parts at `path`.

    `recognise` says which format a file has, if any. With `one_text` the files of a part are read
    as one, whatever they are called.
    """
    finder = _Finder(format, recognise, one_text)
    parts = finder.parts(existing(path))
    if valid_path is None:
        return parts
    held_out = finder.parts(existing(valid_path))
    return Parts(parts.train, held_out.valid or held_out.train, Path(valid_path).name)


def existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"{path}: there is no such file or folder")
    return found


class _Finder:
    def __init__(self, format: str, recognise: Recognise, one_text: bool) -> None:
        self._format = format
        self._recognise = recognise
        self._one_text = one_text

    def parts(self, path: Path) -> Parts:
        if path.is_file():
            return _parts_of_npz(path) or Parts(self._files([path]))
        if (path / MANIFEST).is_file():
            return Parts(Part((path,), "shards"))
        entries = sorted(path.iterdir())
        folders = _by_mark([entry for entry in entries if entry.is_dir()])
        if any(mark in _TRAIN for mark in folders):
            return _marked(path, {mark: self._whole(found[0]) for mark, found in folders.items()})
        files = _by_mark(self._data_files(path))
        if any(mark for mark in files):
            marks = sorted(filter(None, files), key=lambda mark: mark not in _TRAIN)
            return _marked(path, {mark: self._pieces(path, files[mark]) for mark in marks})
        if len(files.get("", ())) == 1:
            return self.parts(files[""][0])
        return Parts(self._whole(path))

    def _whole(self, path: Path) -> Part:
        """Everything in a folder as one part."""
        files = self._data_files(path)
        texts = len(files) > 1 and all(self._recognise(file) == "text" for file in files)
        if (path / MANIFEST).is_file() or not files or (texts and not self._one_text):
            return Part((path,), detect(path) if self._format == "auto" else self._format)
        return self._pieces(path, files)

    def _pieces(self, folder: Path, files: Sequence[Path]) -> Part:
        """Several files are one set if their names differ in nothing but numbers.

        A language model's text may be any files one after the other.
        """
        kinds = {re.sub(r"\d+", "#", plain_name(file)) for file in files}
        if len(kinds) > 1 and not self._one_text:
            names = ", ".join(file.name for file in files)
            raise DataError(f"{folder}: holds more than one data set; set path to one of: {names}")
        return self._files(files)

    def _files(self, files: Sequence[Path]) -> Part:
        format = self._format
        if format == "auto":
            format = self._recognise(files[0]) or detect(files[0])
        return Part(tuple(files), format)

    def _data_files(self, folder: Path) -> list[Path]:
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        files = [file for file in files if not _NOT_DATA.search(file.name.lower())]
        if self._format == "auto":
            files = [file for file in files if self._recognise(file)]
        return [file for file in files if not _is_labels(file)]


def _is_labels(file: Path) -> bool:
    return format_of_name(file) == "idx" and "labels" in file.name


def _by_mark(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Paths by the word in their names that says which part they are; "" for none."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        words = re.split(r"[^a-z0-9]+", plain_name(path))
        mark = next((word for word in words if word in (*_TRAIN, *_HELD_OUT)), "")
        found.setdefault(mark, []).append(path)
    return found


def _marked(folder: Path, found: Mapping[str, Part]) -> Parts:
    train = next((found[mark] for mark in _TRAIN if mark in found), None)
    if train is None:
        names = ", ".join(found)
        raise DataError(
            f"{folder}: has no training part, only {names}; set path (and valid_path) to files"
        )
    mark = next((mark for mark in _HELD_OUT if mark in found), "")
    return Parts(train, found.get(mark), mark)


def _parts_of_npz(path: Path) -> Parts | None:
    """A file of arrays x_train, y_train, x_test, …"""
    if path.suffix != ".npz":
        return None
    ends = {name.rpartition("_")[2] for name in names_in(path)}
    if not ends & set(_TRAIN) or not ends <= {*_TRAIN, *_HELD_OUT}:
        return None
    return _marked(path, {end: Part((path,), "numpy", {"part": end}) for end in ends})
