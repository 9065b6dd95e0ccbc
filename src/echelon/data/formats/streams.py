"""Local files as byte streams for the strict readers: decompressed by suffix, with errors that name
the file.

A stream that is damaged or cut off raises `DataError`. The block parsers open files through
`cutting.Content` instead, which keeps what came before the damage.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, cast

import pyarrow as pa

from echelon.core.errors import DataError

CHUNK = 1 << 20
"""Bytes read or copied at a time."""
BLOCK = 32 << 20
"""Bytes that Arrow's csv and JSON readers parse at a time; the first block decides the types."""


@contextmanager
def open_stream(path: Path) -> Iterator[io.BufferedReader[Stream]]:
    """Open a file that may be compressed."""
    with io.BufferedReader(Stream(path), CHUNK) as reader:
        yield reader


class Stream(io.RawIOBase):
    """The content of a file, decompressed by its suffix.

    A damaged or truncated file raises a `DataError` with the number of bytes read before. gzip
    and bz2 carry checksums, so damage in their content is detected.
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


def _open_zstd(path: Path) -> IO[bytes]:
    return cast(IO[bytes], pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPENERS)
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError)


@contextmanager
def open_native(path: Path) -> Iterator[Any]:
    """Open a file that may be compressed for Arrow's own readers.

    Those read ahead in threads that may outlive the reader. A thread that needs Python's global
    lock while the interpreter exits crashes the process, so these streams contain no Python code.
    Arrow cannot decompress xz; such a file is unpacked to a temporary file first.
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


_ARROW_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


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
    """Decode UTF-8 text; the error for invalid bytes names their line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from None


def plain_name(path: Path) -> str:
    """Return the file's name in lower case, without the suffix of its compression."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name
