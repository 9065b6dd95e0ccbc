"""Profiles any file or folder of data before anything is done with it: `echelon data inspect`.

    path ── sources ── batches ─┬─ columns, in threads, while the next batch is read
                                └─ a few example records
                                         └── Profile ── terminal, JSON, HTML

A path is divided into parts (`sources`), such as train, valid and test. Each part is read once, by
the readers of `echelon.data.formats`. If a reader fails at a bad record, the part is read again by
the tolerant reader of data preparation (`Careful`), which skips bad records and reports them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError, unknown
from echelon.data.formats import FORMATS, Bad, blocks, detect, infer, parse, read
from echelon.data.formats.arrays import names_in
from echelon.data.formats.files import format_of_name, labels_beside
from echelon.data.formats.records import OPTIONS, Block, Input
from echelon.data.formats.streams import plain_name
from echelon.data.inspect.columns import Looking
from echelon.data.inspect.html import write_html
from echelon.data.inspect.profile import ColumnProfile, PartProfile, Profile, Unread
from echelon.data.shards.layout import (
    MANIFEST,
    USUAL_SPLITS,
    how_prepared,
    read_facts,
    shard_sets,
)
from echelon.data.shards.verify import verify

__all__ = ["Profile", "inspect", "verify", "write_html"]

_USUAL_LABELS = ("label", "target", "y", "class")
"""Names of the label column that are recognized, in this order."""


def inspect(
    path: str | Path,
    format: str = "auto",
    *,
    label: str | None = None,
    examples: int = 5,
    told: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> Profile:
    """Return the profile of a file or folder, read in one pass and in constant memory.

    `label` names the column of classes; by default a column with a usual name is taken. `options`
    go to the reader of the format. `told` is called with the number of records read so far.
    """
    begin = time.monotonic()
    found = sources(Path(path).expanduser(), format, options)
    parts = tuple(_parts(found, label, examples, told))
    prepared = _preparation(Path(path).expanduser()) if parts[0].format == "shards" else None
    return Profile(str(path), parts, time.monotonic() - begin, prepared)


def _preparation(folder: Path) -> str | None:
    """Return how the data was prepared, or why its description cannot be read."""
    try:
        facts = read_facts(folder)
    except DataError as error:
        return str(error)
    return None if facts is None else how_prepared(facts)


def _parts(
    found: Sequence[Source], label: str | None, examples: int, told: Callable[[int], None]
) -> Iterator[PartProfile]:
    """Yield the profile of each part; for an unreadable part, why it is unreadable.

    Raises DataError if no part is readable.
    """
    left = len(found)
    for source in found:
        try:
            yield _profile(source, label, examples, told)
        except _NoLabelError:
            raise
        except DataError as error:
            left -= 1
            if not left:
                raise
            files = source.files()
            volume = sum(file.stat().st_size for file in files)
            unread = Unread().and_(str(error), 0)
            yield PartProfile(
                source.name, source.format, len(files), volume, 0, (), None, (), unread
            )


def _profile(
    source: Source, label: str | None, examples: int, told: Callable[[int], None]
) -> PartProfile:
    looking, unread = _read_or_skip_bad(source, label, examples, told)
    columns = looking.columns()
    files = source.files()
    return PartProfile(
        name=source.name,
        format=source.format,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
        records=looking.records,
        columns=columns,
        label=label or _label(columns),
        examples=looking.examples(),
        unread=unread,
    )


def _read_or_skip_bad(
    source: Source, label: str | None, examples: int, told: Callable[[int], None]
) -> tuple[Looking, Unread]:
    """Read a part; if something in it is bad, read it again without the bad records."""
    try:
        looking = _read_all(source, source.batches(), label, examples, told)
        if not looking.records:
            raise DataError(f"{source.paths[0]}: empty: it has no records")
        return looking, Unread()
    except DataError:
        careful = Careful(source)
        if not careful.possible:
            raise
        looking = _read_all(source, careful.batches(), label, examples, told)
        if not looking.records:
            raise
        return looking, careful.unread


def _read_all(
    source: Source,
    stream: Generator[tuple[str, Any]],
    label: str | None,
    examples: int,
    told: Callable[[int], None],
) -> Looking:
    looking = Looking(examples)

    def progress(records: int) -> None:
        told(records)
        # Fail early, unless a later file of the part may have the column.
        if records and len(source.paths) == 1:
            _check_label(source, label, looking.names)

    with closing(stream) as batches:
        looking.look(batches, progress)
    if looking.records:
        _check_label(source, label, looking.names)
    return looking


def _check_label(source: Source, label: str | None, names: Sequence[str]) -> None:
    if label is not None and label not in names:
        raise _NoLabelError(f"{source.paths[0]}: {unknown('label column', label, names)}")


class _NoLabelError(DataError):
    """The label column that the user named does not exist; the data itself may be fine."""


def _label(columns: Sequence[ColumnProfile]) -> str | None:
    lower = {column.name.lower(): column.name for column in columns}
    found = next((lower[usual] for usual in _USUAL_LABELS if usual in lower), None)
    # In files without column names, the label is usually the first column.
    if found is None and columns[0].name == "column0" and columns[0].is_category:
        return "column0"
    return found


# Finding the parts

_SPLITS = (*USUAL_SPLITS, "training", "validation", "val", "dev", "testing", "eval")
_ORDER = ("tr", "va", "de", "te", "ev")
_NOT_DATA = re.compile(
    r"^\.|^readme|^license|\.md$|\.json$|\.ya?ml$|^(quarantine|labels|classes)\."
)
_BLOCK = 8 << 20
"""Bytes per block. Arrow reads up to 32 blocks ahead, so small blocks keep memory low."""
_BY_BLOCK = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """A part of the data: files that are read one after the other."""

    name: str
    paths: tuple[Path, ...]
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def batches(self) -> Generator[tuple[str, Any]]:
        """Yield record batches, each with the file it comes from."""
        block = {"block": _BLOCK} if self.format in _BY_BLOCK else {}
        for path in self.paths:
            for batch in read(path, self.format, **{**block, **self.options}):
                yield str(path), batch

    def files(self) -> list[Path]:
        """Return all files that are read, including files of labels beside the named ones."""
        found = [file for path in self.paths for file in _files_in(path)]
        if self.format == "idx":
            labels = [labels_beside(path) for path in self.paths]
            found += [path for path in labels if path is not None]
        return found


def _files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def sources(path: Path, format: str, options: Mapping[str, Any]) -> list[Source]:
    """Return the parts at `path`: a file, the files of a folder, or train, valid and test.

    `options` go to the reader of each part.
    """
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
    """Return folders named train, test and so on; a single one may be a class of that name."""
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
    """Return the files of a folder; files whose names differ only in numbers are one part."""
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
    """Return a sort key: training first, then validation, then test, then all others."""
    words = re.split(r"[^a-z]+", name.lower())
    places = [_ORDER.index(word[:2]) for word in words if word in _SPLITS]
    return (places[0] if places else len(_ORDER), name)


# Files with bad records

_LINE_FORMATS = ("csv", "tsv", "jsonl", "libsvm", "text")


class Careful:
    """A part with bad records, read as data preparation reads it: the other records are used."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.unread = Unread()

    @property
    def possible(self) -> bool:
        """Whether the format consists of lines and its options exist in a recipe."""
        known = OPTIONS.get(self._source.format, frozenset())
        return (
            self._source.format in _LINE_FORMATS
            and self._source.options.keys() <= known
            and all(path.is_file() for path in self._source.paths)
        )

    def batches(self) -> Generator[tuple[str, Any]]:
        """Yield record batches of the good records, with the columns of the first usable block."""
        schema = None
        for block in self._blocks():
            schema = schema if schema is not None else infer(block, {})
            if schema is None:
                reason = block.fault or "nothing in it can be read"
                self._add(Bad(block.file, block.record, reason, records=0))
                continue
            parsed = parse(block, schema)
            for bad in parsed.bad:
                self._add(bad)
            if parsed.batch.num_rows:
                yield block.file, parsed.batch

    def _add(self, bad: Bad) -> None:
        self.unread = self.unread.and_(str(bad), bad.records)

    def _blocks(self) -> Iterator[Block]:
        settings = {"format": self._source.format, **self._source.options}
        inputs = [Input(path=str(path), **settings) for path in self._source.paths]
        return blocks(inputs)
