"""`inspect()`.

Looking at data before anything is done with it.

path ── sources ── batches ─┬─ look: columns, in threads, while the next batch is read
                            └─ a few examples
                                     └── Profile ── terminal, JSON, HTML
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
from echelon.data.formats.blocks import plain_name
from echelon.data.formats.files import format_of_name, labels_beside
from echelon.data.formats.records import OPTIONS, Block, Input
from echelon.data.inspect.columns import Looking
from echelon.data.inspect.html import write_html
from echelon.data.inspect.profile import ColumnProfile, PartProfile, Profile, Unread
from echelon.data.shards.layout import MANIFEST, how_prepared, read_facts, shard_sets
from echelon.data.shards.layout import USUAL as USUAL_SPLITS
from echelon.data.shards.verify import verify

__all__ = ["Profile", "inspect", "verify", "write_html"]
USUAL = ("label", "target", "y", "class")
"""What the column to predict is called where nobody says."""


def inspect(
    path: str | Path,
    format: str = "auto",
    *,
    label: str | None = None,
    examples: int = 5,
    told: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> Profile:
    """A profile of any file or folder that can be read, in one pass and flat memory.

    `label` names the column of classes, which is found by its name if it has a usual one;
    `options` are those of the format's reader; `told` hears how many records are done.
    """
    begin = time.monotonic()
    found = sources(Path(path).expanduser(), format, options)
    parts = tuple(_parts(found, label, examples, told))
    prepared = _preparation(Path(path).expanduser()) if parts[0].format == "shards" else None
    return Profile(str(path), parts, time.monotonic() - begin, prepared)


def _preparation(folder: Path) -> str | None:
    """How the data was prepared; that it cannot be told is worth telling too."""
    try:
        facts = read_facts(folder)
    except DataError as error:
        return str(error)
    return None if facts is None else how_prepared(facts)


def _parts(
    found: Sequence[Source], label: str | None, examples: int, told: Callable[[int], None]
) -> Iterator[PartProfile]:
    """Of several parts those that can be read, and of the others why not."""
    left = len(found)
    for source in found:
        try:
            yield _look(source, label, examples, told)
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


def _look(
    source: Source, label: str | None, examples: int, told: Callable[[int], None]
) -> PartProfile:
    looking, unread = _looked_at(source, label, examples, told)
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


def _looked_at(
    source: Source, label: str | None, examples: int, told: Callable[[int], None]
) -> tuple[Looking, Unread]:
    """All of a part at once; if something in it is bad, what is left of it, with care."""
    try:
        looking = _seen(source, source.batches(), label, examples, told)
        if not looking.records:
            raise DataError(f"{source.paths[0]}: empty: it has no records")
        return looking, Unread()
    except DataError:
        careful = Careful(source)
        if not careful.possible:
            raise
        looking = _seen(source, careful.batches(), label, examples, told)
        if not looking.records:
            raise
        return looking, careful.unread


def _seen(
    source: Source,
    coming: Generator[tuple[str, Any]],
    label: str | None,
    examples: int,
    told: Callable[[int], None],
) -> Looking:
    looking = Looking(examples)

    def heard(records: int) -> None:
        told(records)
        if records and len(source.paths) == 1:  # another file may have another column
            _check_label(source, label, looking.names)

    with closing(coming) as batches:
        looking.look(batches, heard)
    if looking.records:
        _check_label(source, label, looking.names)
    return looking


def _check_label(source: Source, label: str | None, names: Sequence[str]) -> None:
    if label is not None and label not in names:
        raise _NoLabelError(f"{source.paths[0]}: {unknown('label column', label, names)}")


class _NoLabelError(DataError):
    """Asked for by name, and not there: no fault of the data."""


def _label(columns: Sequence[ColumnProfile]) -> str | None:
    lower = {column.name.lower(): column.name for column in columns}
    found = next((lower[usual] for usual in USUAL if usual in lower), None)
    if found is None and columns[0].name == "column0" and columns[0].is_category:
        return "column0"  # a file without names has the label first
    return found


# Finding the parts

_SPLITS = (*USUAL_SPLITS, "training", "validation", "val", "dev", "testing", "eval")
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


def _files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


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


# Files with bad records

_FORMATS = ("csv", "tsv", "jsonl", "libsvm", "text")


class Careful:
    """A part in which a reader has met something bad."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.unread = Unread()

    @property
    def possible(self) -> bool:
        """Whether this format is one of lines, and its settings are those of a recipe."""
        known = OPTIONS.get(self._source.format, frozenset())
        return (
            self._source.format in _FORMATS
            and self._source.options.keys() <= known
            and all(path.is_file() for path in self._source.paths)
        )

    def batches(self) -> Generator[tuple[str, Any]]:
        """Record batches of what can be read, by the columns of the first block that has any."""
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
