"""Where the shards of the parameters are found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard. It may move to another process, but its address stays."""

    index: int
    host: str
    port: int
    name: str = ""
    """Its abstract unix socket, for those on the same host; empty if it has none."""

    def __str__(self) -> str:
        return f"shard {self.index} at {self.host}:{self.port}"
