"""A strategy that can make use of it hears of the next batch before it computes this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, cast

from echelon.core.interfaces import RemoteStrategy, Strategy
from echelon.core.types import Batch, Lease

Leased: TypeAlias = "tuple[Lease, list[Batch]]"


def told_ahead(strategy: Strategy, stream: Iterator[Leased]) -> Iterator[Leased]:
    """The stream as it is; read one further than it is handed out, if that is worth it."""
    remote = cast(RemoteStrategy, strategy)
    if not (strategy.remote and remote.foresees):
        return stream
    return _told(remote, stream)


def _told(strategy: RemoteStrategy, stream: Iterator[Leased]) -> Iterator[Leased]:
    following = next(stream, None)
    while following is not None:
        this, following = following, next(stream, None)
        strategy.expect(() if following is None else following[1])
        yield this
