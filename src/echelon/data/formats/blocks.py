"""Open, decompress, cut into 16 MiB blocks at records."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeAlias, cast

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats import remote, scan
from echelon.data.formats.records import Block, Source

# --- cutting ---
# Blocks of a file whose records are lines, or rows whose quoted cells may hold lines.

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


# --- unpack ---
# The content of a file piece by piece, unpacked, as far as it is whole.
#
# A stream that is damaged or cut off gives all that came before, and then says so.

Pieces: TypeAlias = Generator[bytes, None, None]
PIECE = 1 << 20
_RAW = 64 << 10
_ZSTD_READ = 16 << 10
"""What a read that fails may have unpacked already, and loses."""

_UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}
PACKED = (*_UNPACKERS, ".zst")

DAMAGED = "damaged"
"""What is said first of a stream that was not just cut off."""


class Damaged(Exception):
    """A stream ended before its end; the message says how."""


def packing(name: str) -> str:
    """The suffix that says how a file is packed, or nothing."""
    lower = name.lower()
    return next((suffix for suffix in PACKED if lower.endswith(suffix)), "")


def unpacked(file: IO[bytes], suffix: str) -> Pieces:
    """Pieces of the content; raises `Damaged` after the last one that is whole."""
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
    """Packed streams one after the other, as `cat a.gz b.gz` makes them."""
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
        told = str(error).splitlines()[0]
        cut_off = "Truncated" in told
        raise Damaged(
            "truncated: its packed stream has no end" if cut_off else f"{DAMAGED}: {told}"
        ) from None
    if whole:
        yield b"".join(whole)


# --- stream ---
# Files as streams of bytes, compressed or not, with errors that name the file.

CHUNK = 1 << 20
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError)


def _open_zstd(path: Path) -> IO[bytes]:
    return cast(IO[bytes], pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}
_ARROW_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COMPRESSED = tuple(_OPENERS)


class Stream(io.RawIOBase):
    """The content of a file, decompressed by its suffix.

    A damaged or truncated file ends in a `DataError` that says after how many bytes; gzip and
    its kin carry checksums, so a damage does not pass unseen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        try:
            if path.is_dir():
                raise DataError(f"{path}: is a folder, not a file")
            opener = _OPENERS.get(path.suffix.lower())
            self._inner = opener(path) if opener else path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._inner.read(len(buffer))
        except _DAMAGE as error:
            raise DataError(
                f"{self.path}: damaged or truncated after {self.count} bytes: {error}"
            ) from None
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


@contextmanager
def open_stream(path: Path) -> Iterator[io.BufferedReader[Stream]]:
    """Read a file that may be compressed."""
    with io.BufferedReader(Stream(path), CHUNK) as reader:
        yield reader


@contextmanager
def open_native(path: Path) -> Iterator[Any]:
    """The same for Arrow's own readers, which read ahead in threads of their own.

    Those threads may outlive the reader, and one that needs Python's lock while the interpreter
    ends brings the process down. So they get streams without any Python in them; xz, which Arrow
    does not know, is unpacked to a file first.
    """
    with ExitStack() as stack:
        suffix = path.suffix.lower()
        plain = stack.enter_context(_unpacked(path)) if suffix == ".xz" else str(path)
        try:
            stream = stack.enter_context(pa.OSFile(plain))
            if suffix in _ARROW_CODECS:
                stream = stack.enter_context(
                    pa.CompressedInputStream(stream, _ARROW_CODECS[suffix])
                )
            yield stream
        except OSError as error:
            raise DataError(f"{path}: damaged or truncated: {error}") from None


@contextmanager
def _unpacked(path: Path) -> Iterator[str]:
    with open_stream(path) as stream, NamedTemporaryFile(prefix="echelon-") as file:
        shutil.copyfileobj(stream, file, CHUNK)
        file.flush()
        yield file.name


def read_bytes(path: Path) -> bytes:
    with open_stream(path) as stream:
        return stream.read()


def decode(content: bytes, path: Path, first_line: int = 1) -> str:
    """UTF-8 text; bytes that are none are named by their line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from None


def plain_name(path: Path) -> str:
    """The file's name in lower case, without a suffix that says how it is compressed."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name
