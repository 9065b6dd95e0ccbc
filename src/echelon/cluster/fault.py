"""An error on its way from a member to the supervisor, as plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from traceback import TracebackException
from typing import Any

from echelon.comm.peers import is_torn
from echelon.core.errors import EchelonError, PeerError


@dataclass(frozen=True, slots=True)
class Fault:
    """What a member raised."""

    kind: str
    message: str
    echelon: list[str] = field(default_factory=list)
    """The error's classes below `EchelonError`, nearest first; empty for a bug."""
    details: dict[str, Any] = field(default_factory=dict)
    """The error's own attributes, as far as they are plain."""
    traceback: str | None = None
    """Only for a bug: an error that was meant is one line."""
    follow_on: bool = False
    """Whether it only says that another member is gone."""
    interrupt: bool = False

    @property
    def line(self) -> str:
        first = next((text for text in self.message.splitlines() if text.strip()), "")
        return f"{self.kind}: {first}" if first else self.kind

    @property
    def peer(self) -> int | None:
        """The member that a follow-on error is about: the first that its text names."""
        named = re.search(r"\bmember (\d+)\b", self.message)
        return int(named[1]) if named else None

    def rebuilt(self) -> EchelonError | None:
        """The same class of error with the same text, unless it was a bug."""
        known = {cls.__name__: cls for cls in _family(EchelonError)}
        for name in self.echelon:
            if name in known:  # a class that only the member has imported is not
                error = known[name].__new__(known[name], self.message)
                for key, value in self.details.items():
                    setattr(error, key, tuple(value) if isinstance(value, list) else value)
                return error
        return None


def fault_of(error: BaseException) -> dict[str, Any]:
    """Everything the supervisor needs to know of this error, as plain data."""
    told = TracebackException.from_exception(error)
    meant = isinstance(error, EchelonError)
    return asdict(
        Fault(
            kind=type(error).__name__,
            message=str(told),
            echelon=[cls.__name__ for cls in type(error).__mro__ if issubclass(cls, EchelonError)],
            details={k: v for k, v in vars(error).items() if meant and _is_plain(v)},
            traceback=None if meant else "".join(told.format()),
            follow_on=isinstance(error, PeerError) or is_torn(error),
            interrupt=isinstance(error, KeyboardInterrupt),
        )
    )


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _family(root: type[EchelonError]) -> Iterator[type[EchelonError]]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)
