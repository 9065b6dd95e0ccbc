"""The content of a file piece by piece, unpacked, as far as it is whole.

A stream that is damaged or cut off gives all that came before, and then says so.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator
from typing import IO, Any, TypeAlias

import pyarrow as pa

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
