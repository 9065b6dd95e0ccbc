"""The link of a shard to the gate: it reports staged pushes, and brings the entries to carry out.

    shard k                                     shard 0, the gate
    HELLO number, incarnation, staged  ───────▶ resends the entries after that number
    STAGED member, seq                 ───────▶ the push is complete here: is it everywhere?
    ◀─────── ENTRY number, version, pushes, whom to give the weights
    SQUARES number, square             ───────▶ where an update is clipped by its norm
    ◀─────── FACTOR number, scale

A shard says HELLO again after it has lost its gate, or the gate has lost it. Entries of another
incarnation (another upload) than the shard's own are skipped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from echelon.comm.channel import Connection, Frame, Segment, connect
from echelon.comm.channel.sockets import Address
from echelon.comm.ps import messages
from echelon.comm.ps.link import is_here
from echelon.comm.ps.messages import Kind
from echelon.core.errors import PeerError
from echelon.server.decisions import Entry
from echelon.server.shard import ServerSettings, Shard

_PAUSE = 0.05
"""Seconds between attempts to reach the gate."""
_CONNECT = 2.0
"""Seconds to connect to another server process."""
_LOOK = 0.3
"""Seconds after which the link looks at the entries even if the gate says nothing: trainers may
have sent a push again that an entry waits for."""
_SQUARES_KEPT = 16
"""Measurements that a gate which takes over gets again."""


class GateLink:
    """The link of a shard other than 0. Its thread hears the gate and carries out its entries."""

    def __init__(self, settings: ServerSettings, shard: Shard, halted: Callable[[], bool]) -> None:
        self._settings, self._shard, self._halted = settings, shard, halted
        self._connection: Connection | None = None
        self._squares: deque[tuple[int, float]] = deque(maxlen=_SQUARES_KEPT)
        """The last measurements. A gate that takes over does not have them."""
        shard.measure = self._measure

    def run(self) -> None:
        """Connect to the gate and hear it, again and again until this process ends."""
        while not self._halted():
            try:
                role = f"shard {self._shard.index}"
                self._connection = dial(self._settings, 0, role, messages.LIMIT)
                self.greet()
                while not self._halted():
                    if (frame := self._connection.receive(_LOOK)) is not None:
                        self._hear(frame)
                    self._shard.order.work()
            except PeerError:  # the gate is lost: connect to the process that takes its place
                time.sleep(_PAUSE)
            finally:
                self.close()

    def greet(self) -> None:
        """Report to the gate how far this shard is: on a new connection, and after an upload."""
        shard = self._shard
        hello = {
            "shard": shard.index,
            "number": shard.number,
            "incarnation": shard.incarnation,
            "staged": [list(push) for push in shard.staged_pushes()],
            "squares": list(self._squares),
        }
        self._send(Kind.HELLO, hello)

    def staged(self, member: int, seq: int) -> None:
        """Report to the gate that a push is complete on this shard."""
        self._send(Kind.STAGED, {"member": member, "seq": seq})

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, kind: Kind, head: dict[str, Any]) -> None:
        """Send a frame, if there is a gate. If not, `greet` reports all to the next gate."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(kind, head)
            except PeerError:
                return

    def _hear(self, frame: Frame) -> None:
        if frame.kind == Kind.FACTOR:  # of an update that this shard has already applied
            return
        if frame.kind != Kind.ENTRY:
            raise PeerError(f"the gate sent a frame of kind {frame.kind}")
        fields = frame.fields()
        if fields.pop("incarnation", None) == self._shard.incarnation:
            entry = Entry.from_json(fields)
            if entry.number > self._shard.heard:  # a gate that takes over repeats some
                self._shard.add(entry)

    def _measure(self, entry: Entry, square: float) -> float:
        """Report this shard's part of a measured entry to the gate, and return the scale.

        The link's own thread calls it while it carries out the entry, so it has to hear the gate
        here.
        """
        connection = self._connection
        if connection is None:
            raise PeerError("the gate is lost")
        self._squares.append((entry.number, square))
        connection.send(Kind.SQUARES, {"number": entry.number, "square": square})
        while (frame := connection.receive(self._settings.deadline)) is not None:
            if frame.kind == Kind.FACTOR:
                fields = frame.fields()
                if fields.get("number") == entry.number:
                    return float(fields["scale"])
            else:
                self._hear(frame)
        raise PeerError("the gate said nothing")


def borrow(settings: ServerSettings, size: int) -> Segment | None:
    """Return the memory of all shards' weights, which shard 0 shares.

    None if shard 0 is on another host, or its memory has another size.
    """
    name = settings.shards[0].name
    if not is_here(name):
        return None
    role = f"shard {settings.shard} asks"
    connection = connect(name, settings.key, role=role, deadline=_CONNECT)
    try:
        connection.send(Kind.SEGMENT, {"size": size})
        frame = connection.receive(settings.deadline)
        if frame is None or not frame.fields().get("shared"):
            return None
        segment = connection.receive_segment(size)
        connection.send(Kind.BYE)
        return segment
    finally:
        connection.close()


def dial(settings: ServerSettings, shard: int, role: str, limit: int) -> Connection:
    """Connect to a shard's process: over a unix socket if it is on this host, else over TCP."""
    address = settings.shards[shard]
    where: Address = address.name if is_here(address.name) else (address.host, address.port)
    connection = connect(where, settings.key, role=role, deadline=_CONNECT)
    connection.limit = limit
    return connection
