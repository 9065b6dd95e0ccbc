"""Files → blocks: pieces of about one size that are parsed each by itself.

Where they are cut depends on the input alone, so whatever is done block by block comes out the
same in any number of processes. The parent looks at every byte once, to cut where a record ends
and to count lines; a worker reads a plain local file again by itself, of all others it is given
the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.core.errors import DataError
from echelon.data.prepare.inputs import Input, Source, sources

SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one input, cut at records."""

    number: int
    """Counts all blocks of all inputs, from 0."""
    file: str
    start: int
    """Where it begins: a byte of the content, a record, a row group or a file, by its format."""
    size: int
    record: int
    """Number of its first line or record, from 1."""
    source: Source = field(repr=False)
    names: tuple[str, ...] | None = None
    """The file's columns, where a header or the recipe names them."""
    members: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """Files that are records of their own, and the class of each."""
    data: bytes | None = field(default=None, repr=False)
    """Its content, where a worker cannot read it by itself."""
    fault: str | None = None
    """Why nothing of it can be read."""
    broken: int | None = 0
    """How many records the fault takes with it; None: all of this block."""
    odd: bool = False
    """Whether quotes do not match somewhere."""

    @property
    def split(self) -> str | None:
        return self.source.split

    def locate(self, line: int) -> tuple[str, int]:
        """File and line of the record that `Parsed.lines` has this number for."""
        return (self.members[line - self.record][0], 1) if self.members else (self.file, line)

    def content(self) -> bytes:
        """Its bytes."""
        if self.data is not None:
            return self.data
        with Path(self.file).open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.file}: became shorter while it was read")
        return data


def blocks(inputs: Sequence[Input], size: int = SIZE) -> Iterator[Block]:
    """All blocks of all inputs, in order."""
    number = 0
    for source in sources(inputs):
        for block in blocks_of(source, size):
            yield dataclasses.replace(block, number=number)
            number += 1


def blocks_of(source: Source, size: int = SIZE) -> Iterator[Block]:
    """The blocks of one file or folder; each counts for itself."""
    from echelon.data.prepare.parse import format_of

    return format_of(source.format).cut(source, size)
