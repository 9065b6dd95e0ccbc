"""Which files to read, and which format they have.

`sources` turns the inputs of a recipe (paths, patterns, folders and URLs) into files in a fixed
order; only the block parsers use it. `detect`, for a local path, serves the strict readers, and
`format_of_name` serves both.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePath

from echelon.core.errors import DataError, unknown
from echelon.data.formats import remote
from echelon.data.formats.records import OPTIONS, Input, Source
from echelon.data.formats.remote import Listed, fixed, forget, is_pattern, meant
from echelon.data.formats.streams import COMPRESSED, plain_name
from echelon.data.shards.layout import MANIFEST, PREPARED

TEXT_SUFFIXES = (".txt", ".text")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
LIBSVM_SUFFIXES = (".libsvm", ".svm", ".svmlight")
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
_IDX_NAME = re.compile(r"idx\d-u?byte$")


def detect(path: Path) -> str:
    """Return the format of a file by its name, or of a folder by its content."""
    found = _of_folder(path) if path.is_dir() else format_of_name(path)
    if found is None:
        known = ", ".join(_BY_SUFFIX)
        raise DataError(
            f"{path}: its format cannot be told from its "
            f"{'content' if path.is_dir() else 'name'}; set format (known: {known}, "
            f"folders of shards, images or texts)"
        )
    return found


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


def format_of_name(path: Path) -> str | None:
    name = plain_name(path)
    if _IDX_NAME.search(name):
        return "idx"
    return _BY_SUFFIX.get(Path(name).suffix)


# The files of a recipe's inputs


def sources(inputs: Sequence[Input]) -> list[Source]:
    """Return every file of the inputs in order.

    Refuse inputs that do not exist, files of unknown format, and settings without effect.
    """
    forget()  # files behind URLs may have changed since the last call
    found = [source for one in inputs for source in _sources(one)]
    if not found:
        raise DataError("there is nothing to read: `read` is empty")
    return found


def _sources(one: Input) -> Iterator[Source]:
    path = remote.local_path(one.path)
    folder = _is_folder(path)
    files = _files(path)
    if not files:
        raise DataError(f"{one.path}: {_why_empty(path, folder)}")
    format = one.format if one.format != "auto" else None
    if folder and (format or _kind_of_files(files)) in ("images", "text"):
        yield from _folder(one, path, format or _kind_of_files(files), files)
        return
    for name, size, stamp in _data_files(one, files, folder):
        kind = format or format_of_name(remote.named(name))
        if kind is None or kind not in OPTIONS:
            raise DataError(
                f"{name}: its format cannot be told from its name; set format "
                f"(choices: {', '.join(OPTIONS)})"
            )
        _refuse_idle(one, kind)
        if kind == "idx":
            stamp += _labels_stamp(name)
        whole = kind == "text" and one.per == "file"
        yield Source(name, "documents" if whole else kind, one, size, stamp)


def _is_folder(path: str) -> bool:
    return remote.is_folder(path) if remote.is_remote(path) else Path(path).is_dir()


def _files(path: str) -> list[Listed]:
    return remote.listed(path) if remote.is_remote(path) else list(_local(path))


def _local(path: str) -> Iterator[Listed]:
    """Yield the local files of a path, a folder or a pattern, in the order of their names."""
    here = Path(path).expanduser()
    if here.is_dir():
        names: Iterable[Path] = _not_hidden_or_prepared(here, here.rglob("*"))
    elif here.exists():
        names = [here]
    else:
        matches = glob.glob(str(here), recursive=True)  # noqa: PTH207 (`..`, roots)
        names = _not_hidden_or_prepared(Path(fixed(here)), map(Path, matches))
    for name in sorted(names):
        about = name.stat()
        yield str(name), about.st_size, str(about.st_mtime_ns)


def _not_hidden_or_prepared(base: Path, names: Iterable[Path]) -> Iterator[Path]:
    @cache
    def prepared(folder: PurePath) -> bool:
        return (base / folder / PREPARED).is_file()

    return (name for name in names if name.is_file() and meant(name.relative_to(base), prepared))


def _why_empty(path: str, folder: bool) -> str:
    if folder:
        return "the folder is empty, hidden files and prepared data aside"
    return "no file matches" if is_pattern(path) else "there is no such file or folder"


def _kind_of_files(files: list[Listed]) -> str:
    """Return what a folder holds: `tables`, else `images`, else `text`, else an empty string."""
    names = [remote.named(name) for name, _, _ in files]
    kinds = {format_of_name(name) for name in names}
    if kinds & (OPTIONS.keys() - {"text"}):
        return "tables"
    images = any(name.suffix.lower() in IMAGE_SUFFIXES for name in names)
    return "images" if images else "text" if "text" in kinds else ""


def _folder(one: Input, path: str, kind: str, files: list[Listed]) -> Iterator[Source]:
    """Yield the sources of a folder of texts or images, which may lie in class folders.

    The folder is one source if its files are records, else each of its files is one.
    """
    _refuse_idle(one, kind)
    records = members(path, kind, files)
    if not records:
        raise DataError(f"{one.path}: holds no {kind}")
    if kind == "text" and one.per == "line":
        for (name, size, stamp), label in records:
            yield Source(name, "text", one, size, stamp, label)
        return
    stamps = hashlib.sha256()
    for (name, size, stamp), _ in records:
        stamps.update(f"{name}\0{size}\0{stamp}\n".encode())
    size = sum(size for (_, size, _), _ in records)
    yield Source(path, "images" if kind == "images" else "documents", one, size, stamps.hexdigest())


def members(
    path: str, kind: str, files: Iterable[Listed] | None = None
) -> list[tuple[Listed, str | None]]:
    """Return the files of a folder that are records, and the class folder of each, if any.

    `kind` is `images` or `text`; `files` is the folder's listing, if the caller has it already.
    """
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
    """Return the parts of a file's path below a folder."""
    if remote.is_remote(folder):
        return remote.below(folder, name)
    return Path(name).relative_to(folder).parts


def _data_files(one: Input, files: list[Listed], folder: bool) -> list[Listed]:
    """Drop files of unknown format (of a folder), and idx labels whose images are there too."""
    if one.format == "auto" and folder:
        files = [file for file in files if format_of_name(remote.named(file[0])) in OPTIONS]
        if not files:
            raise DataError(f"{one.path}: holds no file of a known format ({', '.join(OPTIONS)})")
    names = {remote.named(name).name for name, _, _ in files}
    return [
        file
        for file in files
        if len(files) == 1 or not _go_with_images(remote.named(file[0]).name, names)
    ]


def _go_with_images(name: str, names: set[str]) -> bool:
    return "labels-idx1" in name and name.replace("labels-idx1", "images-idx3") in names


def _refuse_idle(one: Input, kind: str) -> None:
    """Refuse a setting that has no effect on this format."""
    always = {"path", "format", "split"}
    for option in sorted(one.model_fields_set - always):
        if getattr(one, option) is not None and option not in OPTIONS[kind]:
            raise DataError(
                f"{one.path}: {unknown(f'option of format {kind}', option, OPTIONS[kind])}"
            )


# The labels of idx images


def _labels_stamp(images: str) -> str:
    """Return a stamp of the labels beside idx images, because they are not a source themselves."""
    labels = labels_of(images)
    if labels is None:
        return ""
    name, size, stamp = labels
    return f" {remote.named(name).name} {size} {stamp}"


def labels_of(images: str) -> Listed | None:
    """Return the idx file of labels beside a file of images, local or behind a URL, or None."""
    if remote.is_remote(images):
        return remote.beside(images, _label_names(remote.named(images).name))
    labels = labels_beside(Path(images))
    return None if labels is None else next(_local(str(labels)))


def labels_beside(path: Path) -> Path | None:
    """Return the local labels of idx images, or None.

    They are `train-labels-idx1-ubyte.gz` beside `train-images-idx3-ubyte.gz`.
    """
    choices = [path.with_name(name) for name in _label_names(path.name)]
    return next((choice for choice in choices if choice.exists()), None)


def _label_names(images: str) -> list[str]:
    """Return the names that the labels of a file may have; none if its name is not of images."""
    if "images" not in images:
        return []
    name = images.replace("images", "labels").replace("idx3", "idx1")
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return [name + suffix for suffix in ("", *COMPRESSED)]
