"""Find the training part and the held-out part of a data set.

A folder may hold them as files or sub-folders named train… and valid…, dev… or test…, as one
.npz of arrays x_train, x_test, …, or as a single set that is split later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.data.formats.arrays import names_in
from echelon.data.formats.files import detect, format_of_name
from echelon.data.formats.streams import plain_name
from echelon.data.shards.layout import MANIFEST


@dataclass(frozen=True, slots=True)
class Part:
    """Files to read one after the other, and the options of their strict reader."""

    paths: tuple[Path, ...]
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        more = len(self.paths) - 1
        return f"{self.paths[0]} and {more} more" if more else str(self.paths[0])


@dataclass(frozen=True, slots=True)
class Parts:
    """The training part of a data set, and its held-out part if there is one."""

    train: Part
    valid: Part | None = None


Recognise: TypeAlias = Callable[[Path], str | None]
"""Return the format of a file, or None if it is not data."""


def locate(
    section: DataSection,
    *,
    new: bool,
    recognise: Recognise = format_of_name,
    one_text: bool = False,
) -> Parts:
    """Find the parts of a data section that has a path."""
    if section.path is None:
        what = f", not data.name={section.name}" if section.name else ""
        raise DataError(f"there is no data to read: set data.path{what}")
    if new and section.valid_path is not None:
        raise DataError(
            "data.valid_path is for training: all of new data is held out, so set data.path alone"
        )
    return find_parts(
        section.path,
        section.valid_path,
        section.format,
        recognise=recognise,
        one_text=one_text,
        new=new,
    )


def find_parts(
    path: str,
    valid_path: str | None = None,
    format: str = "auto",
    *,
    recognise: Recognise = format_of_name,
    one_text: bool = False,
    new: bool = False,
) -> Parts:
    """Find the training part at `path`, and the held-out part there or, if given, at `valid_path`.

    `recognise` returns the format of a file, if any. With `one_text`, the files of a part may have
    any names, because they are read as one text. For `new` data only one part is returned: the
    held-out one if there are two.
    """
    finder = _Finder(format, recognise, one_text)
    found = finder.parts(_existing(path))
    if new:
        return Parts(_last(found))
    if found.train is None:
        raise DataError(f"{path}: has no training part; set path (and valid_path) to files")
    if valid_path is None:
        return Parts(found.train, found.valid)
    return Parts(found.train, _last(finder.parts(_existing(valid_path))))


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"{path}: there is no such file or folder")
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    """The parts found; at least one is not None."""

    train: Part | None
    valid: Part | None = None


def _last(found: _Found) -> Part:
    part = found.valid or found.train
    assert part is not None
    return part


class _Finder:
    """A search for parts by the names of files and folders."""

    def __init__(self, format: str, recognise: Recognise, one_text: bool) -> None:
        self._format = format
        self._recognise = recognise
        self._one_text = one_text

    def parts(self, path: Path) -> _Found:
        if path.is_file():
            return _parts_of_npz(path) or _Found(self._files([path]))
        if (path / MANIFEST).is_file():
            return _Found(Part((path,), "shards"))
        folders = _by_mark(_folders(path))
        if _are_parts(folders):
            return _marked({mark: self._whole(some[0]) for mark, some in folders.items() if mark})
        files = _by_mark(self._data_files(path))
        if any(files):
            marks = sorted(filter(None, files), key=lambda mark: mark not in _TRAIN)
            return _marked({mark: self._pieces(path, files[mark]) for mark in marks})
        if len(files.get("", ())) == 1:
            return self.parts(files[""][0])
        return _Found(self._whole(path))

    def _whole(self, path: Path) -> Part:
        """Return everything in a folder as one part."""
        files = self._data_files(path)
        texts = len(files) > 1 and all(self._recognise(file) == "text" for file in files)
        if (path / MANIFEST).is_file() or not files or (texts and not self._one_text):
            return Part((path,), detect(path) if self._format == "auto" else self._format)
        return self._pieces(path, files)

    def _pieces(self, folder: Path, files: Sequence[Path]) -> Part:
        """Return several files as one part, if their names differ only in numbers.

        The text of a language model may consist of files with any names.
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
        files = [file for file in files if not _is_labels(file)]
        if self._format == "auto":
            return [file for file in files if self._recognise(file)]
        # With a stated format, files whose names fit it are preferred; if none fits, all are taken.
        return [file for file in files if self._recognise(file) == self._format] or files


_TRAIN = ("train", "training")
# The first of these that exists is held out. test comes after valid, because a test set is for the
# final evaluation.
_HELD_OUT = ("valid", "validation", "val", "dev", "test", "testing", "t10k", "eval")
_NOT_DATA = re.compile(r"^\.|^readme|^license|^(labels|classes)\.|\.md$|\.json$|\.ya?ml$")


def _is_labels(file: Path) -> bool:
    return format_of_name(file) == "idx" and "labels" in file.name


def _folders(path: Path) -> list[Path]:
    entries = (entry for entry in sorted(path.iterdir()) if entry.is_dir())
    return [entry for entry in entries if not entry.name.startswith((".", "__"))]


def _by_mark(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Group paths by the word in their names that marks a part; "" if there is none."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        words = re.split(r"[^a-z0-9]+", plain_name(path))
        mark = next((word for word in words if word in (*_TRAIN, *_HELD_OUT)), "")
        found.setdefault(mark, []).append(path)
    return found


def _are_parts(folders: Mapping[str, Sequence[Path]]) -> bool:
    """Return whether folders are parts; `train` beside unmarked ones may be a class of vehicles."""
    held_out = any(mark in _HELD_OUT for mark in folders)
    return any(mark in _TRAIN for mark in folders) and (held_out or "" not in folders)


def _marked(found: Mapping[str, Part]) -> _Found:
    train = next((found[mark] for mark in _TRAIN if mark in found), None)
    return _Found(train, next((found[mark] for mark in _HELD_OUT if mark in found), None))


def _parts_of_npz(path: Path) -> _Found | None:
    """Return the parts of an .npz of arrays x_train, y_train, x_test, …, or None."""
    if path.suffix != ".npz":
        return None
    ends = {name.rpartition("_")[2] for name in names_in(path)}
    if not ends <= {*_TRAIN, *_HELD_OUT}:
        return None
    return _marked({end: Part((path,), "numpy", {"part": end}) for end in ends})


def about_parts(parts: Parts) -> dict[str, Any]:
    """Return name and paths of the parts, for the report."""
    about: dict[str, Any] = {"name": _name(parts.train), "path": parts.train.where}
    if parts.valid is not None:
        about["held_out"] = parts.valid.where
    return about


def _name(part: Part) -> str:
    """Return the name of a data set: its folder, or its file without suffixes."""
    path: Path = part.paths[0].absolute()
    inner = path.name.lower().startswith(("train", "test", "valid", "dev", "t10k", "input"))
    return path.parent.name if inner else path.name.split(".")[0]
