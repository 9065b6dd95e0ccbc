"""What a server process is told when it starts. Everything about the model comes from trainers."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.comm.servers.address import ShardAddress


@dataclass(frozen=True, slots=True)
class ServerSettings:
    shard: int
    shards: tuple[ShardAddress, ...]
    """All of them, in order; shard 0 is the gate."""
    key: bytes = field(repr=False)
    """The run's: whoever does not know it is refused."""
    deadline: float = 30.0
    """Seconds until whoever is awaited is given up."""
    twin: bool = False
    """Whether this process stands by until it is promoted (SIGUSR1)."""

    @property
    def address(self) -> ShardAddress:
        return self.shards[self.shard]
