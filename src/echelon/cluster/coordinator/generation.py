"""What members and coordinator tell each other of themselves, on the member's side."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cluster.coordinator.frames import BadFrame, Message


@dataclass(frozen=True, slots=True)
class About:
    """A member as it introduces itself."""

    number: int | None
    """Its place among those started together; None for one that joins."""
    name: str
    host: str
    """The same for two processes if and only if one finds the other's pid."""


@dataclass(frozen=True, slots=True)
class Fellow:
    """Another member, or oneself."""

    id: int
    host: str
    pid: int
    name: str

    def __str__(self) -> str:
        return f"member {self.id} (pid {self.pid} on {self.host.partition('/')[0]})"


@dataclass(frozen=True, slots=True)
class Generation:
    """A fixed set of members, and one's own place among them."""

    number: int
    index: int
    members: tuple[Fellow, ...]
    store: tuple[str, int]
    """Host and port of where its members meet."""
    name: str
    """Under which they meet there: no other generation has it."""
    source: int | None
    """The index of the one who heals those behind; None if nobody has to be healed."""
    behind: tuple[int, ...]
    recorded: int
    """The last version on record."""
    anew: bool = False
    """Whether nobody has the run's state, and the source has to read a checkpoint."""


def read_generation(message: Message) -> Generation:
    try:
        host, port = message["store"]
        return Generation(
            number=message["number"],
            index=message["index"],
            members=tuple(Fellow(**member) for member in message["members"]),
            store=(host, port),
            name=message["name"],
            source=message["source"],
            behind=tuple(message["behind"]),
            anew=message["anew"],
            recorded=message["recorded"],
        )
    except (KeyError, TypeError, ValueError):
        raise BadFrame("a frame 'generation' lacks something") from None
