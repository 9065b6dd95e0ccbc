"""What a trainer has to know of the servers, and they of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.comm.servers.address import ShardAddress


@dataclass(frozen=True, slots=True)
class Directory:
    """Of one trainer in one generation."""

    shards: tuple[ShardAddress, ...]
    key: bytes
    """Of the run: whoever knows it may take part."""
    member: int
    """This trainer's number, which no other trainer of the run ever had."""
    generation: int
    members: tuple[int, ...]
    """All trainers of the generation."""
    deadline: float
    halted: Callable[[], str | None]
    """Why nobody is to be waited for any more, if so."""
