"""What a recipe reads: paths, patterns, folders and URLs → files in a fixed order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from echelon.core.config.sections import Section
from echelon.core.errors import DataError, unknown
from echelon.data.prepare import remote
from echelon.data.prepare.listing import Listed, is_pattern, local
from echelon.data.prepare.reached import forget
from echelon.data.readers.delimited import MISSING
from echelon.data.readers.detect import format_of_name
from echelon.data.readers.documents import SUFFIXES as TEXTS
from echelon.data.readers.idx import label_names, labels_beside
from echelon.data.readers.images import SUFFIXES as IMAGES
from echelon.data.readers.stream import plain_name

_TABLE = frozenset({"header", "names", "delimiter", "quote", "columns", "missing"})
OPTIONS: Mapping[str, frozenset[str]] = {
    "csv": _TABLE,
    "tsv": _TABLE,
    "jsonl": frozenset({"columns"}),
    "parquet": frozenset({"columns"}),
    "text": frozenset({"per"}),
    "images": frozenset(),
    "idx": frozenset(),
    "libsvm": frozenset({"width", "zero_based"}),
}
"""Which settings of an input a format knows."""
FORMATS = tuple(OPTIONS)


class Input(Section):
    """One row of a recipe's `read`."""

    path: str
    """A file, a folder, a pattern such as `train*.csv.gz`, or an fsspec URL."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "idx", "libsvm"] = (
        "auto"
    )
    split: str | None = None
    """The split that all of it belongs to."""
    columns: tuple[str, ...] | None = None
    """Which columns to read; all if not given."""
    header: bool | None = None
    """Whether the first line of a csv or tsv names its columns; found out if not given."""
    names: tuple[str, ...] | None = None
    """What the columns of a csv or tsv without a header are called."""
    delimiter: str | None = None
    """What stands between the cells: `,` in a csv and a tab in a tsv, if not given."""
    quote: bool | None = None
    """Whether cells may stand in double quotes: in a csv, and not in a tsv, if not given."""
    missing: tuple[str, ...] = MISSING
    """Cells that stand for a number that is missing."""
    per: Literal["line", "file"] | None = None
    """What one text is: a file (usual for a folder) or a line (usual for a file)."""
    width: PositiveInt | None = None
    """How many features a libsvm file has at most."""
    zero_based: bool = False
    """Whether the features of a libsvm file count from 0."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file that is read, or one folder whose files are records."""

    file: str
    format: str
    options: Input = field(repr=False)
    size: int
    stamp: str
    """Changes when the file does: for telling whether work done before still holds."""
    label: str | None = None
    """The class of all its records, where a folder says it."""

    @property
    def split(self) -> str | None:
        return self.options.split


def sources(inputs: Sequence[Input]) -> list[Source]:
    """Every file in order; refuses what is not there and what has no known format."""
    forget()
    found = [source for one in inputs for source in _sources(one)]
    if not found:
        raise DataError("there is nothing to read: `read` is empty")
    return found


def _sources(one: Input) -> Iterator[Source]:
    path = remote.local_path(one.path)
    folder = _is_folder(path)
    files = _files(path)
    if not files:
        raise DataError(f"{one.path}: {_nothing(path, folder)}")
    format = one.format if one.format != "auto" else None
    if folder and (format or _kind_of_files(files)) in ("images", "text"):
        yield from _folder(one, path, format or _kind_of_files(files), files)
        return
    for name, size, stamp in _data_files(one, files, folder):
        kind = format or format_of_name(remote.named(name))
        if kind is None or kind not in OPTIONS:
            raise DataError(
                f"{name}: its format cannot be told from its name; set format "
                f"(choices: {', '.join(FORMATS)})"
            )
        _known(one, kind)
        if kind == "idx":
            stamp += _labels_stamp(name)
        whole = kind == "text" and one.per == "file"
        yield Source(name, "documents" if whole else kind, one, size, stamp)


def _folder(one: Input, path: str, kind: str, files: list[Listed]) -> Iterator[Source]:
    """A folder whose files are records, or texts of many records, by classes if it has any."""
    _known(one, kind)
    records = members(path, kind, files)
    if not records:
        raise DataError(f"{one.path}: holds no {kind}")
    if kind == "text" and one.per == "line":
        for (name, size, stamp), label in records:
            yield Source(name, "text", one, size, stamp, label)
        return
    told = hashlib.sha256()
    for (name, size, stamp), _ in records:
        told.update(f"{name}\0{size}\0{stamp}\n".encode())
    size = sum(size for (_, size, _), _ in records)
    yield Source(path, "images" if kind == "images" else "documents", one, size, told.hexdigest())


def members(
    path: str, kind: str, files: Iterable[Listed] | None = None
) -> list[tuple[Listed, str | None]]:
    """The files of a folder that are records, and the class folder each lies in."""
    if files is None:
        files = _files(path)
    suffixes = IMAGES if kind == "images" else TEXTS
    chosen = [
        file
        for file in files
        if file[0] == path or plain_name(remote.named(file[0])).endswith(suffixes)
    ]
    inner = [_inner(path, name) for name, _, _ in chosen]
    deep = [parts for parts in inner if len(parts) > 1]
    if deep and len(deep) < len(inner):
        loose = next(parts[0] for parts in inner if len(parts) == 1)
        raise DataError(f"{path}: {kind} lie in class folders and beside them ({loose})")
    return [
        (file, parts[0] if len(parts) > 1 else None)
        for file, parts in zip(chosen, inner, strict=True)
    ]


def _inner(folder: str, name: str) -> tuple[str, ...]:
    """The parts of a file's path below a folder."""
    if remote.is_remote(folder):
        return remote.below(folder, name)
    return Path(name).relative_to(folder).parts


def _is_folder(path: str) -> bool:
    return remote.is_folder(path) if remote.is_remote(path) else Path(path).is_dir()


def _files(path: str) -> list[Listed]:
    return remote.listed(path) if remote.is_remote(path) else list(local(path))


def _labels_stamp(images: str) -> str:
    """Of the labels that are read along with images: they are no source of their own."""
    labels = labels_of(images)
    if labels is None:
        return ""
    name, size, stamp = labels
    return f" {remote.named(name).name} {size} {stamp}"


def labels_of(images: str) -> Listed | None:
    """The idx file of labels that lies beside one of images, here or elsewhere."""
    if remote.is_remote(images):
        return remote.beside(images, label_names(remote.named(images).name))
    labels = labels_beside(Path(images))
    return None if labels is None else next(local(str(labels)))


def _nothing(path: str, folder: bool) -> str:
    if folder:
        return "the folder is empty, hidden files and prepared data aside"
    return "no file matches" if is_pattern(path) else "there is no such file or folder"


def _kind_of_files(files: list[Listed]) -> str:
    """What a folder holds: a table in pieces before images before texts."""
    names = [remote.named(name) for name, _, _ in files]
    kinds = {format_of_name(name) for name in names}
    if kinds & (OPTIONS.keys() - {"text"}):
        return "tables"
    images = any(name.suffix.lower() in IMAGES for name in names)
    return "images" if images else "text" if "text" in kinds else ""


def _data_files(one: Input, files: list[Listed], folder: bool) -> list[Listed]:
    """Of a folder only what has a format we know, and no labels that go with images."""
    if one.format == "auto" and folder:
        files = [file for file in files if format_of_name(remote.named(file[0])) in OPTIONS]
        if not files:
            raise DataError(f"{one.path}: holds no file of a known format ({', '.join(FORMATS)})")
    names = {remote.named(name).name for name, _, _ in files}
    return [
        file for file in files if len(files) == 1 or not _labels(remote.named(file[0]).name, names)
    ]


def _labels(name: str, names: set[str]) -> bool:
    return "labels-idx1" in name and name.replace("labels-idx1", "images-idx3") in names


def _known(one: Input, kind: str) -> None:
    """Refuse a setting that has no effect."""
    always = {"path", "format", "split"}
    for option in sorted(one.model_fields_set - always):
        if getattr(one, option) is not None and option not in OPTIONS[kind]:
            raise DataError(
                f"{one.path}: {unknown(f'option of format {kind}', option, OPTIONS[kind])}"
            )
