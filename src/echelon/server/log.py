"""Entries in their order, numbered, and how far each other shard has heard of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from echelon.comm.channel import Connection
from echelon.comm.servers.messages import Kind
from echelon.core.errors import PeerError
from echelon.server.entry import Entry

_KEPT = 4096
"""Entries for a shard that comes back; those that nobody was answered to are few."""


class Log:
    """Not locked: the desk is."""

    def __init__(self) -> None:
        self.incarnation = 0
        self._entries: deque[Entry] = deque(maxlen=_KEPT)
        self._peers: dict[int, Connection] = {}
        self.number = 0

    @property
    def peers(self) -> int:
        """How many other shards there are to be told."""
        return len(self._peers)

    def begin(self, incarnation: int, number: int = 0, past: Sequence[Entry] = ()) -> None:
        """Of an upload: nothing but the `past` is of use. Peers say hello again."""
        self.incarnation, self.number = incarnation, number
        self._entries.clear()
        self._entries.extend(past)
        self._peers.clear()

    def add(self, entry: Entry) -> None:
        assert entry.number == self.number + 1, f"entry {entry.number} after {self.number}"
        self.number = entry.number
        self._entries.append(entry)
        for shard, connection in list(self._peers.items()):
            self._send(shard, connection, entry)

    def greet(self, shard: int, connection: Connection, number: int, incarnation: int) -> None:
        """A shard says how far it is: tell it what it lacks, and from now on all."""
        self._peers.pop(shard, None)
        if incarnation != self.incarnation:
            return
        first = self._entries[0].number if self._entries else self.number + 1
        if not first - 1 <= number <= self.number:
            return
        self._peers[shard] = connection
        for entry in self._entries:
            if entry.number > number:
                self._send(shard, connection, entry)

    def tell(self, number: int, scale: float) -> None:
        for connection in self._peers.values():
            _try(connection, Kind.FACTOR, {"number": number, "scale": scale})

    def forget(self, shard: int, connection: Connection) -> None:
        if self._peers.get(shard) is connection:
            del self._peers[shard]

    def hang_up(self) -> None:
        """Say nothing more to anybody."""
        for connection in self._peers.values():
            connection.close()
        self._peers.clear()

    def _send(self, shard: int, connection: Connection, entry: Entry) -> None:
        fields = entry.to_json() | {"incarnation": self.incarnation}
        if not _try(connection, Kind.ENTRY, fields):
            self.forget(shard, connection)


def _try(connection: Connection, kind: Kind, head: dict[str, object]) -> bool:
    """Whether it was sent: one that is lost is noticed by whoever listens to it."""
    try:
        connection.send(kind, head)
    except PeerError:
        return False
    return True
