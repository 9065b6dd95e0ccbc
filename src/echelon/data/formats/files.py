"""Paths, patterns, folders → sources; format detection."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import DataError, unknown
from echelon.data.formats import remote
from echelon.data.formats.records import OPTIONS, Source
from echelon.data.formats.remote import Listed, forget, is_pattern, local
from echelon.data.formats.streams import COMPRESSED, plain_name
from echelon.data.shards.layout import MANIFEST

if TYPE_CHECKING:
    from echelon.data.formats.records import Input


# --- documents ---

TEXT_SUFFIXES = (".txt", ".text")


# --- libsvm ---

LIBSVM_SUFFIXES = (".libsvm", ".svm", ".svmlight")


# --- detect ---
# Which format a file or a folder has, by its name and what lies in it.

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
    **dict.fromkeys(LIBSVM_SUFFIXES, "libsvm"),
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
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
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
            return "images"
        if any(plain_name(file).endswith(TEXT_SUFFIXES) for file in files):
            return "text"
    return None


# --- inputs ---
# What a recipe reads: paths, patterns, folders and URLs → files in a fixed order.

FORMATS = tuple(OPTIONS)


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
    suffixes = IMAGE_SUFFIXES if kind == "images" else TEXT_SUFFIXES
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
    images = any(name.suffix.lower() in IMAGE_SUFFIXES for name in names)
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


# --- images ---

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


# --- idx ---


def labels_beside(path: Path) -> Path | None:
    """`train-labels-idx1-ubyte.gz` beside `train-images-idx3-ubyte.gz`."""
    choices = [path.with_name(name) for name in label_names(path.name)]
    return next((choice for choice in choices if choice.exists()), None)


def label_names(images: str) -> list[str]:
    """What the labels of a file of images may be called; nothing, if it holds no images."""
    if "images" not in images:
        return []
    name = images.replace("images", "labels").replace("idx3", "idx1")
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return [name + suffix for suffix in ("", *COMPRESSED)]
