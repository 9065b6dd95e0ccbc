"""Open files elsewhere, whose troubles are told as ours.

A server that cannot give parts of a file, or does not say how long it is, is asked for all of it
once: that goes to a temporary file, which has no name and so is never left behind.
"""

from __future__ import annotations

import io
import os
import tarfile
import weakref
import zlib
from functools import lru_cache
from tempfile import TemporaryFile
from typing import Any
from zipfile import BadZipFile

from echelon.data.prepare.unreachable import Unreachable, reaching

DAMAGE = (BadZipFile, tarfile.TarError, zlib.error, EOFError)
"""How an archive that is not whole shows."""
_HELD = 2
"""Whole files a process keeps: a worker is mostly at one, and may go back to the one before."""
_SECONDS = 60.0
"""Until a server that says nothing is given up."""


def over_http(system: Any) -> bool:
    return "http" in system.protocol


class Reached(io.IOBase):
    """A file of a file system elsewhere, or of an archive.

    A part that does not come is an `Unreachable`; what came and is damaged is an `OSError`, as it
    is for files here.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        # An archive closes itself when nobody knows it any more, so it has to be known.
        self._system, self._path, self._url = system, path, url
        with reaching(url, "cannot be opened"):
            self.size: int | None = None
            self._inner = self._parts() if over_http(system) else system.open(path, "rb")

    @property
    def original(self) -> str:
        """What it is called: fsspec tells by it how a tar is packed."""
        return self._url.partition("::")[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._inner.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with reaching(self._url, "cannot be read"):
            self._inner.seek(offset, whence)
            return self.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        at = self.tell()
        with reaching(self._url, f"cannot be read from byte {at} on"):
            try:
                data = self._read(-1 if size is None else size)
            except DAMAGE as error:
                damage = f"damaged: {error}"
            else:
                self._refuse_early_end(at, size, data)
                return data
        raise OSError(damage)

    def _parts(self) -> Any:
        about = self._system.info(self._path)
        self.size = about["size"]
        if self.size and about.get("partial", True):
            return self._system.open(self._path, "rb", size=self.size)
        return self._whole()

    def _read(self, size: int) -> bytes:
        at = self.tell()
        try:
            return bytes(self._inner.read(size))
        except ValueError:  # so fsspec says that the server cannot give parts
            if not over_http(self._system) or isinstance(self._inner, _View):
                raise
        self._inner.close()
        self._inner = self._whole()
        self._inner.seek(at)
        return bytes(self._inner.read(size))

    def _refuse_early_end(self, at: int, size: int | None, data: bytes) -> None:
        """A connection that is closed early may look like the end of the file."""
        if over_http(self._system) and self.size and size != 0 and not data and at < self.size:
            raise Unreachable(f"{self._url}: breaks off after {at:,} of {self.size:,} bytes")

    def _whole(self) -> _View:
        fetched = _fetched(self._system, self._path, self._url, self.size)
        self.size = fetched.size
        return _View(fetched)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_inner"):
            self._inner.close()
        super().close()


class _Fetched:
    """All of a file, on disk; closed when nobody has it any more."""

    def __init__(self, system: Any, path: str, url: str, size: int | None) -> None:
        file = TemporaryFile(prefix="echelon-", buffering=0)  # noqa: SIM115 (outlives this)
        weakref.finalize(self, file.close)
        self.descriptor = file.fileno()
        with reaching(url, "cannot be fetched"):
            system.get_file(path, file)
        self.size = os.fstat(self.descriptor).st_size
        if size and self.size != size:
            raise Unreachable(f"{url}: breaks off after {self.size:,} of {size:,} bytes")


@lru_cache(1)
def servers() -> Any:
    """All that is reached over http, and its connections, which are closed with it."""
    import fsspec
    from aiohttp import ClientTimeout

    # None for a file as a whole, which may be large; for every answer one of its own.
    deadlines = ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
    options = {"client_kwargs": {"timeout": deadlines}, "skip_instance_cache": True}
    return fsspec.filesystem("http", **options)


@lru_cache(_HELD)
def _fetched(system: Any, path: str, url: str, size: int | None) -> _Fetched:
    return _Fetched(system, path, url, size)


def forget() -> None:
    """Let go of whole files, which may change, and of connections."""
    _fetched.cache_clear()
    servers.cache_clear()


class _View(io.RawIOBase):
    """A fetched file with a place of its own in it: several may read it."""

    def __init__(self, fetched: _Fetched) -> None:
        self._fetched = fetched
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._fetched.size)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        done = os.preadv(self._fetched.descriptor, [buffer], self._at)
        self._at += done
        return done
