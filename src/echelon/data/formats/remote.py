"""Files here and elsewhere (fsspec); errors that name the URL."""

from __future__ import annotations

import glob
import io
import os
import re
import tarfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, cast
from urllib.parse import unquote
from zipfile import BadZipFile

from echelon.core.errors import DataError, MissingExtra, UserError
from echelon.data.shards.layout import PREPARED

# --- remote ---
# Files behind URLs, through fsspec, which is imported when one is met.

_STAMPS = (
    *("ETag", "etag", "md5", "checksum", "CRC"),
    *("mtime", "LastModified", "modified", "created", "Last-Modified"),
)

_ARCHIVES = ("zip", "tar")
_HTTP = ("http", "https")


def is_remote(path: str) -> bool:
    return "://" in path


def named(path: str) -> Path:
    """What a name is told by: of `zip://inner.csv::outer.zip` that is `inner.csv`."""
    return Path(path.partition("::")[0] if is_remote(path) else path)


def local_path(path: str) -> str:
    """`file:///tmp/a%20b` as the plain path it is; anything else unchanged."""
    return unquote(path.removeprefix("file://")) if path.startswith("file://") else path


def filesystem(url: str) -> tuple[Any, str]:
    """What holds a URL, and the path it has there."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra(f"the URL {url}", "remote") from error
    inner, chained, outer = url.partition("::")
    kind = inner.partition("://")[0]
    with reaching(url):
        if chained and kind in _ARCHIVES:
            # Opened by ourselves, so that an archive can lie wherever a file can.
            try:
                system = fsspec.filesystem(kind, fo=_archive(local_path(outer)))
            except DAMAGE as error:
                raise DataError(f"{outer}: not a whole {kind} archive: {error}") from None
            return system, str(system._strip_protocol(inner))
        if kind in _HTTP:
            return servers(), url
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))


def _archive(path: str) -> Reached:
    """Closes itself as soon as nobody reads from it."""
    import fsspec

    if is_remote(path):
        return Reached(*filesystem(path), path)
    return Reached(fsspec.filesystem("file"), str(Path(path).expanduser()), path)


def open_binary(path: str) -> IO[bytes]:
    """A file here or elsewhere; it cannot be opened: a `DataError`."""
    if is_remote(path):
        return cast(IO[bytes], Reached(*filesystem(path), path))
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None


def read_whole(path: str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def is_folder(url: str) -> bool:
    system, path = filesystem(url)
    if over_http(system):  # to ask a server may fetch all of a file
        return path.endswith("/")
    with reaching(url):
        return bool(system.isdir(path))


def below(folder: str, url: str) -> tuple[str, ...]:
    """The parts of a file's path below a folder's."""
    from fsspec import get_filesystem_class

    inner = folder.partition("::")[0], url.partition("::")[0]
    kind = get_filesystem_class(inner[0].partition("://")[0])
    base, path = (PurePosixPath(kind._strip_protocol(one)) for one in inner)
    return path.relative_to(base).parts


def listed(url: str) -> list[Listed]:
    """The files that a URL, a pattern or a folder stands for: URL, size, what tells of changes."""
    system, path = filesystem(url)
    _, chain, rest = url.partition("::")  # `zip://inner::outer`: what the files lie in
    with reaching(url, "cannot be listed"):
        names = _on_server(system, path) if over_http(system) else _names(system, path)
        found = [(system.unstrip_protocol(name), system.info(name)) for name in sorted(names)]
    return [
        (f"{name}{chain}{rest}", int(about.get("size") or 0), _stamp(about))
        for name, about in found
    ]


def beside(url: str, names: Iterable[str]) -> Listed | None:
    """The first of these files that lies where this one does."""
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
    """fsspec says so of a server in trouble too; one that hides what is not there answers 403."""
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
    """Of a page with links, if a folder or a pattern is asked for. A `?` begins a query."""
    open_ended = any(sign in path for sign in "*[")
    if not path.endswith("/") and (not open_ended or system.isfile(path)):
        return [path]
    root = re.split(r"[*\[]", path)[0].rpartition("/")[0] + "/"
    system.ls(root)  # what fsspec takes for an empty folder may be out of reach
    names = system.find(path) if path == root else system.glob(path)
    return _meant(PurePosixPath(root), [name for name in names if not name.endswith("/")])


def _meant(base: PurePath, names: Iterable[str]) -> list[str]:
    """Those that are raw data; what is prepared is told by the listing alone: to ask takes long."""
    inner = {name: _inner(base, name) for name in names}
    known = {path.parent for path in inner.values() if path.name == PREPARED}
    return [name for name, path in inner.items() if meant(path, known.__contains__)]


def _inner(base: PurePath, name: str) -> PurePath:
    path = PurePosixPath(name)
    return path.relative_to(base) if path.is_relative_to(base) else PurePosixPath(path.name)


def _stamp(about: dict[str, Any]) -> str:
    return next((str(about[key]) for key in _STAMPS if about.get(key) is not None), "")


# --- reached ---
# Open files elsewhere, whose troubles are told as ours.
#
# A server that cannot give parts of a file, or does not say how long it is, is asked for all of it
# once: that goes to a temporary file, which has no name and so is never left behind.

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


# --- unreachable ---
# What stands between us and a file elsewhere: a server, the network, a package that is missing.
#
# It says nothing of the data, and may be gone the next time. So it ends a preparation, where
# damage in a file that was read takes some records out.

_PLAIN = {401: "it wants a login", 403: "it may not be read", 404: "there is no such file"}


class Unreachable(DataError):
    """A file elsewhere, or the rest of one, cannot be had."""


@contextmanager
def reaching(url: str, what: str = "cannot be reached") -> Iterator[None]:
    """Tell whatever goes wrong within in one line.

    Every kind of storage has errors of its own, of packages that may not be there to be named:
    that is why all are taken.
    """
    try:
        yield
    except UserError:  # told already
        raise
    except ImportError as error:
        raise _missing(url, error) from error
    except Exception as error:
        raise Unreachable(f"{url}: {what}: {why(error)}") from error


def status(error: BaseException) -> int | None:
    """The number of an answer over http that is no file."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    found = getattr(cause or error, "status", None)
    return found if isinstance(found, int) else None


def why(error: BaseException) -> str:
    """The reason alone, without the URL that fsspec likes to give as one."""
    number = status(error)
    if number is not None:
        told = _PLAIN.get(number) or getattr(error.__cause__ or error, "message", "")
        return f"the server answers {number}" + (f": {told}" if told else "")
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return why(error.__cause__)
    if isinstance(error, FileNotFoundError):
        return _PLAIN[404]
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    inner = getattr(error.__cause__, "message", None)  # aiohttp: how an answer broke off
    told = inner or getattr(error, "strerror", None) or str(error)
    return str(told).splitlines()[0] if told else type(error).__name__


def _missing(url: str, error: ImportError) -> UserError:
    """What to install: our extra has what http needs, other kinds have packages of their own."""
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


# --- listing ---
# Which files a path, a pattern or a folder stands for, and which of them nobody means.

Listed = tuple[str, int, str]
"""A file, its size, and what changes when it does."""
_SIGNS = "*?["


def is_pattern(path: str) -> bool:
    return any(sign in path for sign in _SIGNS)


def fixed(pattern: PurePath) -> PurePath:
    """The folder that a pattern names before it leaves anything open."""
    kept = 0
    while kept < len(pattern.parts) and not is_pattern(pattern.parts[kept]):
        kept += 1
    return type(pattern)(*pattern.parts[:kept])


def meant(inner: PurePath, prepared: Callable[[PurePath], bool]) -> bool:
    """Whether a file that was found, not named, is raw data: it is not hidden, and no preparation
    has written it. What is read and what is written may lie in one folder.

    `inner` is its path below the folder that was named.
    """
    hidden = any(part.startswith(".") and part != ".." for part in inner.parts)
    folders = list(inner.parents)[:-1]
    return not hidden and not any(prepared(folder) for folder in folders)


def local(path: str) -> Iterator[Listed]:
    """The files here, in the order of their names."""
    here = Path(path).expanduser()
    if here.is_dir():
        names: Iterable[Path] = _found(here, here.rglob("*"))
    elif here.exists():
        names = [here]
    else:
        matches = glob.glob(str(here), recursive=True)  # noqa: PTH207 (`..`, roots)
        names = _found(Path(fixed(here)), map(Path, matches))
    for name in sorted(names):
        about = name.stat()
        yield str(name), about.st_size, str(about.st_mtime_ns)


def _found(base: Path, names: Iterable[Path]) -> Iterator[Path]:
    @cache
    def prepared(folder: PurePath) -> bool:
        return (base / folder / PREPARED).is_file()

    return (name for name in names if name.is_file() and meant(name.relative_to(base), prepared))
