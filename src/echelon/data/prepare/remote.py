"""Files behind URLs, through fsspec, which is imported when one is met."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, cast
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from echelon.core.errors import DataError, MissingExtra
from echelon.data.prepare.listing import Listed, fixed, is_pattern, meant
from echelon.data.shards.manifest import PREPARED

_STAMPS = (
    *("ETag", "etag", "md5", "checksum", "CRC"),
    *("mtime", "LastModified", "modified", "created"),
)

_HELD: WeakKeyDictionary[IO[bytes], Any] = WeakKeyDictionary()
"""What open files are read from: an archive closes itself when nobody knows it any more."""


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
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except (ValueError, ImportError, OSError) as error:
        raise DataError(f"{url}: cannot be reached: {error}") from None


def open_binary(path: str) -> IO[bytes]:
    """A file here or elsewhere; it cannot be opened: a `DataError`."""
    try:
        if is_remote(path):
            system, inner = filesystem(path)
            file = cast(IO[bytes], system.open(inner, "rb"))
            _HELD[file] = system
            return file
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None


def read_whole(path: str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def is_folder(url: str) -> bool:
    system, path = filesystem(url)
    try:
        return bool(system.isdir(path))
    except OSError as error:
        raise DataError(f"{url}: cannot be reached: {error}") from None


def below(folder: str, url: str) -> tuple[str, ...]:
    """The parts of a file's path below a folder's."""
    system, path = filesystem(folder)
    return Path(system._strip_protocol(url.partition("::")[0])).relative_to(path).parts


def listed(url: str) -> list[Listed]:
    """The files that a URL, a pattern or a folder stands for: URL, size, what tells of changes."""
    system, path = filesystem(url)
    _, chain, rest = url.partition("::")  # `zip://inner::outer`: what the files lie in
    try:
        if system.isfile(path):
            names = [path]
        elif is_pattern(path):
            matches = [name for name in system.glob(path) if system.isfile(name)]
            names = _meant(fixed(PurePosixPath(path)), matches)
        else:
            names = _meant(PurePosixPath(path), system.find(path))
        found = [(system.unstrip_protocol(name), system.info(name)) for name in sorted(names)]
    except OSError as error:
        raise DataError(f"{url}: cannot be listed: {error}") from None
    return [
        (f"{name}{chain}{rest}", int(about.get("size") or 0), _stamp(about))
        for name, about in found
    ]


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
