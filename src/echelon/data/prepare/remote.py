"""Files behind URLs, through fsspec, which is imported when one is met."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, cast
from urllib.parse import unquote

from echelon.core.errors import DataError, MissingExtra
from echelon.data.prepare.listing import Listed, fixed, is_pattern, meant
from echelon.data.prepare.reached import DAMAGE, Reached, over_http, servers
from echelon.data.prepare.unreachable import reaching, status
from echelon.data.shards.manifest import PREPARED

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
