"""Where a member stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member stands: which of how many, and how the others are found."""

    index: int
    count: int
    host: str = "127.0.0.1"
    """Of the store."""
    port: int = 0
    """Of the store."""
    listener: int | None = None
    """Member 0, local launch: descriptor of a socket already bound and listening there."""
    deadline: float = 120.0
    """Seconds a member waits for another before it gives up."""
    served: bool = False
    """Somebody else, such as torchrun's agent, serves the store."""
    name: str = "echelon"
    """Set apart from what else is in the store, such as an earlier try of the same run."""
    interface: str | None = None
    """Of the network, or several with commas between: where others reach this member. None: the
    one on the way to the store."""
