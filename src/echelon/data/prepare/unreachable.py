"""What stands between us and a file elsewhere: a server, the network, a package that is missing.

It says nothing of the data, and may be gone the next time. So it ends a preparation, where damage
in a file that was read takes some records out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from echelon.core.errors import DataError, MissingExtra, UserError

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
