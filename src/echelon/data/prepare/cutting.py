"""Blocks of a file whose records are lines, or rows whose quoted cells may hold lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from echelon.data.prepare import remote, scan
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.unpack import Damaged, packing, unpacked

LONGEST = 16 << 20
"""Bytes of the longest record: a quote that is never closed ends there."""
SHOWN = 2000
"""Bytes of a record that are shown when nothing can be made of it."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands before the records of a file."""

    size: int = 0
    names: tuple[str, ...] | None = None
    fault: str | None = None
    """Why none of its records can be read."""


Cut: TypeAlias = Callable[[bytes, bool], tuple[int, bool]]
"""Content that begins with a record, and whether the file ends with it → where the last whole
record ends (0: none does), and whether its quotes are odd."""
Head: TypeAlias = Callable[[bytes], Heading]


def cut_text(
    source: Source, size: int, cut: Cut, head: Head = lambda _: Heading()
) -> Iterator[Block]:
    """The blocks of a file, and one for the rest if it is damaged or there is nothing in it."""
    content = Content(source.file)
    try:
        yield from _Cutter(source, size, cut, content).blocks(head)
    finally:
        content.close()


class _Cutter:
    def __init__(self, source: Source, size: int, cut: Cut, content: Content) -> None:
        self._source = source
        self._size = size
        self._cut = cut
        self._content = content
        self._at = 0
        self._line = 1
        # A worker reads a part of these by itself.
        self._plain = not (packing(source.file) or remote.is_remote(source.file))

    def blocks(self, head: Head) -> Iterator[Block]:
        content, heading = self._content, self._heading(head)
        if not content.data and content.whole:
            header = "it has a header but no records"
            yield self._fault(f"empty: {header}" if heading.names else "empty", 0)
        wanted = self._size
        while content.data:
            part, last = content.data[:wanted], len(content.data) <= wanted
            end, odd = self._cut(part, last and content.whole)
            if not end and len(part) >= max(LONGEST, self._size):
                end, odd = scan.first_line(part), True
                if not end:
                    yield self._fault(f"a record of more than {LONGEST >> 20} MiB", 1)
                    self._at += content.skip_line()
                    self._line += 1
                    continue
            if end:
                yield self._block(content.take(end), heading, odd)
                wanted = self._size
            elif last and content.ended:
                break
            else:
                wanted *= 2
            content.fill(wanted)
        if content.damage is not None:
            yield self._fault(content.damage, int(bool(content.data)))

    def _heading(self, head: Head) -> Heading:
        content = self._content
        content.fill(max(self._size, 1 << 16))
        if content.data.startswith(_BOM):
            self._at += len(content.take(len(_BOM)))
        heading = head(content.data)
        self._passed(content.take(heading.size))
        content.fill(self._size)
        return heading

    def _passed(self, part: bytes) -> None:
        self._at += len(part)
        self._line += scan.lines_in(part)

    def _block(self, part: bytes, heading: Heading, odd: bool) -> Block:
        block = Block(
            0,
            self._source.file,
            self._at,
            len(part),
            self._line,
            self._source,
            names=heading.names,
            data=None if self._plain else part,
            fault=heading.fault,
            broken=None if heading.fault else 0,
            odd=odd,
        )
        self._passed(part)
        return block

    def _fault(self, fault: str, broken: int) -> Block:
        """Nothing to parse: why, and how it begins."""
        shown = self._content.data[:SHOWN]
        return Block(
            0,
            self._source.file,
            self._at,
            len(shown),
            self._line,
            self._source,
            data=shown,
            fault=fault,
            broken=broken,
        )


class Content:
    """The content of a file, unpacked, as much at a time as is asked for."""

    def __init__(self, file: str) -> None:
        self._file = remote.open_binary(file)
        self._pieces = unpacked(self._file, packing(remote.named(file).name))
        self.data = b""
        self.ended = False
        self.damage: str | None = None
        self._passed = 0

    @property
    def whole(self) -> bool:
        """Whether the file ends with `data`, as it should."""
        return self.ended and self.damage is None

    def fill(self, size: int) -> None:
        """Have at least this much, if there is as much."""
        parts, have = [self.data], len(self.data)
        while have < size and not self.ended:
            piece = self._next()
            parts.append(piece)
            have += len(piece)
        self.data = b"".join(parts)

    def take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def exactly(self, size: int) -> bytes:
        """The next bytes, fewer only at the end."""
        self.fill(size)
        return self.take(size)

    def skip_line(self) -> int:
        """Pass over bytes up to the end of a line; how many they were."""
        passed = 0
        while not (end := scan.first_line(self.data)) and not self.ended:
            passed += len(self.data)
            self.data = self._next()
        return passed + len(self.take(end or len(self.data)))

    def close(self) -> None:
        self._pieces.close()
        self._file.close()

    def _next(self) -> bytes:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.ended, piece = True, b""
        except Damaged as damage:
            self.ended, piece = True, b""
            self.damage = f"{damage} (after {self._passed} bytes of content)"
        self._passed += len(piece)
        return piece
