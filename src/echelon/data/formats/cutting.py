"""Cut a file into blocks of about one size, each ending where a record ends.

    file ─ unpacked() ─▶ pieces ─ Content ─▶ bytes on demand ─ cut_text() ─▶ blocks

`cut_text` serves the block parsers of formats whose records are lines, or rows with quoted cells
that may hold line ends. idx files use only `Content`, whole texts only `unpacked`.

A file that is damaged or cut off yields blocks for all that came before the damage, and then one
block with the fault. The strict readers open files with `streams` instead.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import pyarrow as pa

from echelon.data.formats import remote, scan
from echelon.data.formats.records import Block, Source

LONGEST = 16 << 20
"""Bytes of the longest record. Limits how far a quote that is never closed can reach."""
SHOWN = 2000
"""Bytes kept of content that cannot be cut into records, to show them in the quarantine."""


def cut_into_lines(source: Source, size: int) -> Iterator[Block]:
    """Yield the blocks of a file whose records are lines."""
    return cut_text(source, size, lambda data, last: (scan.cut_lines(data, last), False))


def cut_text(
    source: Source, size: int, cut: Cut, head: Head = lambda _: Heading()
) -> Iterator[Block]:
    """Yield the blocks of a file.

    A damaged or empty file ends with a block that has a `fault` and no records to parse.
    """
    content = Content(source.file)
    try:
        yield from _Cutter(source, size, cut, content).blocks(head)
    finally:
        content.close()


Cut: TypeAlias = Callable[[bytes, bool], tuple[int, bool]]
"""`cut(content, last)` → (end, odd): where the last whole record ends (0 if none does), and whether
quotes do not match. `content` begins with a record; `last` says that the file ends with it."""


@dataclass(frozen=True, slots=True)
class Heading:
    """The part of a file before its first record."""

    size: int = 0
    names: tuple[str, ...] | None = None
    fault: str | None = None
    """Why none of its records can be read."""


Head: TypeAlias = Callable[[bytes], Heading]


class _Cutter:
    """The cutting of one file: the byte and the line at which the next block begins."""

    def __init__(self, source: Source, size: int, cut: Cut, content: Content) -> None:
        self._source = source
        self._size = size
        self._cut = cut
        self._content = content
        self._at = 0
        self._line = 1
        # Workers read their part of a plain local file themselves; other blocks carry their bytes.
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
        """Return a block that cannot be parsed, with the reason and its first bytes."""
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


_BOM = b"\xef\xbb\xbf"


class Content:
    """A buffer of a file's unpacked content: `fill` appends, `take` removes from the front."""

    def __init__(self, file: str) -> None:
        self._file = remote.open_binary(file)
        self._pieces = unpacked(self._file, packing(remote.named(file).name))
        self.data = b""
        self.ended = False
        self.damage: str | None = None
        self._passed = 0

    @property
    def whole(self) -> bool:
        """Whether `data` reaches to the end of the file, and the file is not damaged."""
        return self.ended and self.damage is None

    def fill(self, size: int) -> None:
        """Read until `data` has at least `size` bytes or the file ends."""
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
        """Take exactly `size` bytes; fewer only at the end of the file."""
        self.fill(size)
        return self.take(size)

    def skip_line(self) -> int:
        """Skip to the end of the current line and return the number of bytes skipped."""
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


# Unpacking: a stream that is damaged or cut off gives all that came before, and then says so

DAMAGED = "damaged"
"""Prefix of the fault of a stream whose bytes are wrong, not just missing at the end. The records
before such damage are doubtful."""


class Damaged(Exception):
    """A packed stream is damaged or cut off; the message is the reason."""


PIECE = 1 << 20
"""Bytes of unpacked content per piece, about."""
Pieces: TypeAlias = Generator[bytes, None, None]
_UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}
PACKED = (*_UNPACKERS, ".zst")


def packing(name: str) -> str:
    """Return the suffix of a file's compression, or an empty string."""
    lower = name.lower()
    return next((suffix for suffix in PACKED if lower.endswith(suffix)), "")


def unpacked(file: IO[bytes], suffix: str) -> Pieces:
    """Yield the unpacked content in pieces; raise `Damaged` after the last intact piece."""
    if not suffix:
        return _plain(file)
    return _zstd(file) if suffix == ".zst" else _streams(file, _UNPACKERS[suffix])


def _plain(file: IO[bytes]) -> Pieces:
    while True:
        try:
            piece = file.read(PIECE)
        except OSError as error:
            raise Damaged(f"cannot be read on: {error.strerror or error}") from None
        if not piece:
            return
        yield piece


def _streams(file: IO[bytes], start: Callable[[], Any]) -> Pieces:
    """Unpack a file that may hold several packed streams in a row, as `cat a.gz b.gz` makes it."""
    stream, begun = start(), False
    for raw in _raw(file):
        while raw or begun:
            if stream.eof:
                stream, begun = start(), False
                raw = raw.lstrip(b"\0")  # padding between streams and after the last one
                continue
            try:
                piece = stream.decompress(raw, PIECE)
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
                raise Damaged(f"{DAMAGED}: {error}") from None
            begun = True
            if piece:
                yield piece
            raw = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")
            if not raw and not stream.eof and (not piece or getattr(stream, "needs_input", True)):
                break
    if begun and not stream.eof:
        raise Damaged("truncated: its packed stream has no end")


_RAW = 64 << 10
"""Packed bytes handed to a decompressor at a time."""


def _raw(file: IO[bytes]) -> Pieces:
    for piece in _plain(file):
        for start in range(0, len(piece), _RAW):
            yield piece[start : start + _RAW]


def _zstd(file: IO[bytes]) -> Pieces:
    whole: list[bytes] = []
    size = 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd") as stream:
            while piece := stream.read(_ZSTD_READ):
                whole.append(piece)
                size += len(piece)
                if size >= PIECE:
                    yield b"".join(whole)
                    whole, size = [], 0
    except OSError as error:
        if whole:
            yield b"".join(whole)
        reason = str(error).splitlines()[0]
        cut_off = "Truncated" in reason
        raise Damaged(
            "truncated: its packed stream has no end" if cut_off else f"{DAMAGED}: {reason}"
        ) from None
    if whole:
        yield b"".join(whole)


_ZSTD_READ = 16 << 10
"""Bytes per read. A read that fails loses the bytes it has unpacked, so it is kept small."""
