"""Files behind URLs, through fsspec, which is imported when one is met."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import unquote

from echelon.core.errors import DataError, MissingExtra


def is_remote(path: str) -> bool:
    return "://" in path


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
            return cast(IO[bytes], system.open(inner, "rb"))
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None


def read_whole(path: str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def listed(url: str) -> list[tuple[str, int, str]]:
    """The files that a URL, a pattern or a folder stands for: URL, size, what tells of changes."""
    system, path = filesystem(url)
    try:
        if system.isfile(path):
            names = [path]
        elif any(sign in path for sign in "*?["):
            names = [name for name in system.glob(path) if system.isfile(name)]
        else:
            names = system.find(path)
        found = [(system.unstrip_protocol(name), system.info(name)) for name in sorted(names)]
    except OSError as error:
        raise DataError(f"{url}: cannot be listed: {error}") from None
    return [(name, int(about.get("size") or 0), _stamp(about)) for name, about in found]


def _stamp(about: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "md5", "checksum", "mtime", "LastModified", "modified", "created"):
        if about.get(key) is not None:
            return str(about[key])
    return ""
