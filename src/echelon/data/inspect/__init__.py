"""Looking at data before anything is done with it.

path ── sources ── batches ─┬─ look: columns, in threads, while the next batch is read
                            └─ a few examples
                                     └── Profile ── terminal, JSON, HTML
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError, unknown
from echelon.data.inspect.careful import Careful
from echelon.data.inspect.html import write_html
from echelon.data.inspect.look import Looking
from echelon.data.inspect.profile import ColumnProfile, PartProfile, Profile, Unread
from echelon.data.inspect.sources import Source, sources
from echelon.data.inspect.verify import verify
from echelon.data.preparation import how_prepared, read_facts

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


class _NoLabelError(DataError):
    """Asked for by name, and not there: no fault of the data."""


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


def _label(columns: Sequence[ColumnProfile]) -> str | None:
    lower = {column.name.lower(): column.name for column in columns}
    found = next((lower[usual] for usual in USUAL if usual in lower), None)
    if found is None and columns[0].name == "column0" and columns[0].is_category:
        return "column0"  # a file without names has the label first
    return found
