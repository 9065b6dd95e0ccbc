"""Files behind URLs and in archives, through fsspec, which is imported on first use.

`open_binary` opens any file, local or behind a URL; `listed`, `below`, `beside` and `is_folder`
look at folders behind URLs. All errors are one line that names the URL.

`Unreachable` means that a server, the network or a package failed. It says nothing about the data
and may be gone the next time, so it ends a preparation. Damage in a file that was read makes some
of its records bad instead.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, cast
from urllib.parse import unquote
from zipfile import BadZipFile

from echelon.core.errors import DataError, MissingExtra, UserError
from echelon.data.shards.layout import PREPARED


def is_remote(path: str) -> bool:
    return "://" in path


def named(path: str) -> Path:
    """Return the path whose name shows the format: `inner.csv` of `zip://inner.csv::outer.zip`."""
    return Path(path.partition("::")[0] if is_remote(path) else path)


def local_path(path: str) -> str:
    """Return `file:///tmp/a%20b` as the path `/tmp/a b`, and anything else unchanged."""
    return unquote(path.removeprefix("file://")) if path.startswith("file://") else path


def open_binary(path: str) -> IO[bytes]:
    """Open a local file or one behind a URL; raise `DataError` if it cannot be opened."""
    if is_remote(path):
        return cast(IO[bytes], Reached(*filesystem(path), path))
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None


def read_whole(path: str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system that holds a URL, and the path of the URL in it."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra(f"the URL {url}", "remote") from error
    inner, chained, outer = url.partition("::")
    kind = inner.partition("://")[0]
    with reaching(url):
        if chained and kind in _ARCHIVES:
            # The archive is opened by `_archive`, so it may be any local file or URL.
            try:
                system = fsspec.filesystem(kind, fo=_archive(local_path(outer)))
            except DAMAGE as error:
                raise DataError(f"{outer}: not a whole {kind} archive: {error}") from None
            return system, str(system._strip_protocol(inner))
        if kind in _HTTP:
            return servers(), url
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))


_ARCHIVES = ("zip", "tar")
_HTTP = ("http", "https")


def over_http(system: Any) -> bool:
    return "http" in system.protocol


def _archive(path: str) -> Reached:
    """Open an archive; it closes itself when it is no longer referenced."""
    import fsspec

    if is_remote(path):
        return Reached(*filesystem(path), path)
    return Reached(fsspec.filesystem("file"), str(Path(path).expanduser()), path)


@lru_cache(1)
def servers() -> Any:
    """Return the http file system. It owns the connections, which are closed with it."""
    import fsspec
    from aiohttp import ClientTimeout

    # No deadline for a whole file, which may be large; one for connecting and for each read.
    deadlines = ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
    options = {"client_kwargs": {"timeout": deadlines}, "skip_instance_cache": True}
    return fsspec.filesystem("http", **options)


_SECONDS = 60.0
"""Seconds after which a silent server counts as unreachable, for connecting and for each answer."""


# Listings

Listed = tuple[str, int, str]
"""A file, its size, and a stamp that changes when the file does."""
# Keys of fsspec's file information that change with the file; the first one present is used.
_STAMPS = (
    *("ETag", "etag", "md5", "checksum", "CRC"),
    *("mtime", "LastModified", "modified", "created", "Last-Modified"),
)


def listed(url: str) -> list[Listed]:
    """List the files of a URL, a pattern or a folder."""
    system, path = filesystem(url)
    _, chain, rest = url.partition("::")  # of `zip://inner::outer`, `rest` is the archive
    with reaching(url, "cannot be listed"):
        names = _on_server(system, path) if over_http(system) else _names(system, path)
        found = [(system.unstrip_protocol(name), system.info(name)) for name in sorted(names)]
    return [
        (f"{name}{chain}{rest}", int(about.get("size") or 0), _stamp(about))
        for name, about in found
    ]


def is_folder(url: str) -> bool:
    system, path = filesystem(url)
    if over_http(system):  # asking the server may fetch the whole file
        return path.endswith("/")
    with reaching(url):
        return bool(system.isdir(path))


def below(folder: str, url: str) -> tuple[str, ...]:
    """Return the parts of a file's path below a folder, both given as URLs."""
    from fsspec import get_filesystem_class

    inner = folder.partition("::")[0], url.partition("::")[0]
    kind = get_filesystem_class(inner[0].partition("://")[0])
    base, path = (PurePosixPath(kind._strip_protocol(one)) for one in inner)
    return path.relative_to(base).parts


def beside(url: str, names: Iterable[str]) -> Listed | None:
    """Return the first of `names` that exists in the same folder as `url`, or None."""
    system, path = filesystem(url)
    inner, chain, rest = url.partition("::")
    here, there = inner.rpartition("/")[0], path.rpartition("/")
    for name in names:
        found = f"{here}/{name}{chain}{rest}"
        with reaching(found):
            try:
                about = system.info("".join((*there[:2], name)))
            except FileNotFoundError as error:
                if not _is_absent(error):
                    raise
            else:
                return found, int(about.get("size") or 0), _stamp(about)
    return None


def _is_absent(error: FileNotFoundError) -> bool:
    """Return whether a file really is absent: fsspec raises the same error if a server fails.

    A server that hides which files exist answers 403.
    """
    number = status(error)
    return error.__cause__ is None or (number is not None and number < 500)


def _names(system: Any, path: str) -> list[str]:
    if system.isfile(path):
        return [path]
    if is_pattern(path):
        matches = [name for name in system.glob(path) if system.isfile(name)]
        return _meant(fixed(PurePosixPath(path)), matches)
    return _meant(PurePosixPath(path), system.find(path))


def _on_server(system: Any, path: str) -> list[str]:
    """List a web server's files by the links of a page, if `path` is a folder or a pattern.

    In a URL, `?` begins a query; only `*` and `[` make a pattern.
    """
    open_ended = any(sign in path for sign in "*[")
    if not path.endswith("/") and (not open_ended or system.isfile(path)):
        return [path]
    root = re.split(r"[*\[]", path)[0].rpartition("/")[0] + "/"
    system.ls(root)  # raises if the server fails; `find` and `glob` would return nothing
    names = system.find(path) if path == root else system.glob(path)
    return _meant(PurePosixPath(root), [name for name in names if not name.endswith("/")])


def _meant(base: PurePath, names: Iterable[str]) -> list[str]:
    """Keep the files that are raw data.

    Folders of prepared data are recognized by the listing alone, because each request to a server
    takes long.
    """
    inner = {name: _inner(base, name) for name in names}
    known = {path.parent for path in inner.values() if path.name == PREPARED}
    return [name for name, path in inner.items() if meant(path, known.__contains__)]


def _inner(base: PurePath, name: str) -> PurePath:
    path = PurePosixPath(name)
    return path.relative_to(base) if path.is_relative_to(base) else PurePosixPath(path.name)


def _stamp(about: dict[str, Any]) -> str:
    return next((str(about[key]) for key in _STAMPS if about.get(key) is not None), "")


# Raw data among the files of a listing, for local folders too


def meant(inner: PurePath, prepared: Callable[[PurePath], bool]) -> bool:
    """Return whether a file of a listing is raw data: not hidden, not written by a preparation.

    A preparation may write into the folder that it reads. `inner` is the file's path below the
    folder that was named; `prepared` says whether a folder below it holds prepared data.
    """
    hidden = any(part.startswith(".") and part != ".." for part in inner.parts)
    folders = list(inner.parents)[:-1]
    return not hidden and not any(prepared(folder) for folder in folders)


def is_pattern(path: str) -> bool:
    return any(sign in path for sign in _SIGNS)


_SIGNS = "*?["


def fixed(pattern: PurePath) -> PurePath:
    """Return the folder in front of the first part of a pattern that has `*`, `?` or `[`."""
    kept = 0
    while kept < len(pattern.parts) and not is_pattern(pattern.parts[kept]):
        kept += 1
    return type(pattern)(*pattern.parts[:kept])


# Open files


class Reached(io.IOBase):
    """An open file behind a URL or in an archive.

    Reading raises `Unreachable` if bytes do not arrive, and `OSError` if they arrive damaged, as it
    does for local files. If a web server cannot send parts of a file, or does not say how long it
    is, the whole file is fetched once into a temporary file; that has no name, so it is never left
    behind.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        # An archive's file system closes itself when it is no longer referenced: keep it.
        self._system, self._path, self._url = system, path, url
        with reaching(url, "cannot be opened"):
            self.size: int | None = None
            self._inner = self._parts() if over_http(system) else system.open(path, "rb")

    @property
    def original(self) -> str:
        """The name by which fsspec recognizes the compression of a tar."""
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
        except ValueError:  # raised by fsspec if the server cannot send parts
            if not over_http(self._system) or isinstance(self._inner, _View):
                raise
        self._inner.close()
        self._inner = self._whole()
        self._inner.seek(at)
        return bytes(self._inner.read(size))

    def _refuse_early_end(self, at: int, size: int | None, data: bytes) -> None:
        """Raise if the connection was closed early, which looks like the end of the file."""
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


DAMAGE = (BadZipFile, tarfile.TarError, zlib.error, EOFError)
"""Errors that mean an archive is damaged."""


def forget() -> None:
    """Drop fetched files, which may change on the server, and close connections."""
    _fetched.cache_clear()
    servers.cache_clear()


_HELD = 2
"""Fetched files that a process keeps: a worker reads one, and may go back to the previous one."""


@lru_cache(_HELD)
def _fetched(system: Any, path: str, url: str, size: int | None) -> _Fetched:
    return _Fetched(system, path, url, size)


class _Fetched:
    """A whole file fetched to disk; removed when it is no longer referenced."""

    def __init__(self, system: Any, path: str, url: str, size: int | None) -> None:
        file = TemporaryFile(prefix="echelon-", buffering=0)  # noqa: SIM115 (outlives this)
        weakref.finalize(self, file.close)
        self.descriptor = file.fileno()
        with reaching(url, "cannot be fetched"):
            system.get_file(path, file)
        self.size = os.fstat(self.descriptor).st_size
        if size and self.size != size:
            raise Unreachable(f"{url}: breaks off after {self.size:,} of {size:,} bytes")


class _View(io.RawIOBase):
    """A reader of a fetched file with its own position; several may read one file."""

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


# Errors


class Unreachable(DataError):
    """A file behind a URL, or the rest of it, cannot be fetched."""


@contextmanager
def reaching(url: str, what: str = "cannot be reached") -> Iterator[None]:
    """Turn any error within into one line that names the URL.

    Every kind of storage has its own exceptions, from packages that may not be installed. So they
    cannot be listed here, and every exception is caught.
    """
    try:
        yield
    except UserError:  # is one line already
        raise
    except ImportError as error:
        raise _missing(url, error) from error
    except Exception as error:
        raise Unreachable(f"{url}: {what}: {why(error)}") from error


def why(error: BaseException) -> str:
    """Return the reason of an error without the URL, which fsspec often gives as the reason."""
    number = status(error)
    if number is not None:
        reason = _ANSWERS.get(number) or getattr(error.__cause__ or error, "message", "")
        return f"the server answers {number}" + (f": {reason}" if reason else "")
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return why(error.__cause__)
    if isinstance(error, FileNotFoundError):
        return _ANSWERS[404]
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    inner = getattr(error.__cause__, "message", None)  # aiohttp: how an answer broke off
    reason = inner or getattr(error, "strerror", None) or str(error)
    return str(reason).splitlines()[0] if reason else type(error).__name__


_ANSWERS = {401: "it wants a login", 403: "it may not be read", 404: "there is no such file"}


def status(error: BaseException) -> int | None:
    """Return the http status of an error, or None."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    found = getattr(cause or error, "status", None)
    return found if isinstance(found, int) else None


def _missing(url: str, error: ImportError) -> UserError:
    """Return an error that says what to install: Echelon's extra for http, else another package."""
    from fsspec.registry import known_implementations

    names = [part.partition("://")[0] for part in url.split("::")]
    for name in names:
        known: dict[str, Any] = known_implementations.get(name, {})
        package = str(known.get("class", "")).partition(".")[0]
        if package not in ("", "fsspec"):
            return UserError(f"the URL {url} needs a package: pip install {package}")
    if {"http", "https"} & set(names):
        return MissingExtra(f"the URL {url}", "remote")
    return UserError(f"the URL {url} needs a package: {error}")
