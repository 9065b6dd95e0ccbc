"""A process that does what its shard does, and takes its place when it is lost.

Whatever comes is received whole before any of it counts, so the last thing a dying shard said is
there or it is not. Promoted, it has what every trainer was ever told of; what was decided but not
applied is carried out as soon as the trainers have sent their pushes again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from echelon.comm.channel import Connection, Frame, connect
from echelon.comm.channel.sockets import Address
from echelon.comm.servers import documents
from echelon.comm.servers.link import is_here
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.part import blank
from echelon.comm.servers.row_messages import blank_state
from echelon.core.errors import PeerError
from echelon.server.entry import Entry
from echelon.server.settings import ServerSettings
from echelon.server.shard import Shard
from echelon.server.tables import flat

_PAUSE = 0.02
_PATIENCE = 2.0
_LARGEST = 1 << 48
_KEPT = 256


class Twin:
    def __init__(self, settings: ServerSettings, shard: Shard, over: Callable[[], bool]) -> None:
        self._settings, self._shard, self._over = settings, shard, over
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self.gate: dict[str, Any] | None = None
        """The state of the gate, if the shard has it."""
        self._decided: dict[int, Entry] = {}
        self.past: deque[Entry] = deque(maxlen=_KEPT)
        """What was done last, for other shards that come back."""
        self.scales: dict[int, float] = {}

    @property
    def decided(self) -> list[Entry]:
        """What is decided but not applied here, in its order."""
        return [self._decided[number] for number in sorted(self._decided)]

    def run(self) -> None:
        """Follow the shard, whichever process that is, until this one is it."""
        while not self._over():
            try:
                self._follow()
            except PeerError:  # it is lost, or not there yet
                time.sleep(_PAUSE)

    def stop(self) -> None:
        """Hear nothing more; returns once nothing is being applied any more."""
        connection = self._connection
        if connection is not None:
            connection.close()
        with self._lock:
            return

    def _follow(self) -> None:
        self._connection = connection = self._dial()
        try:
            with self._lock:
                if self._over():
                    return
                # The shard lives, and may have gone on without its twin meanwhile.
                self._shard.incarnation = 0
            connection.send(Kind.HELLO, {})
            while (frame := connection.receive()) is not None:
                with self._lock:
                    if self._over():
                        return
                    self._hear(connection, frame)
        finally:
            connection.close()

    def _dial(self) -> Connection:
        address = self._settings.address
        where: Address = address.name if is_here(address.name) else (address.host, address.port)
        role = f"twin {self._settings.shard}"
        connection = connect(where, self._settings.key, role=role, deadline=_PATIENCE)
        connection.limit = _LARGEST  # what is taken has to have just the size that is due
        return connection

    def _hear(self, connection: Connection, frame: Frame) -> None:
        number = frame.fields().get("number", 0)
        document = documents.take(connection, frame)
        if frame.kind == Kind.MIRROR:
            self._become(connection, document)
        elif frame.kind == Kind.DECIDED:
            self._keep(document)
            connection.send(Kind.ACK, {"number": number})
        elif frame.kind == Kind.APPLIED:
            self._apply(connection, document, number)
        else:
            raise PeerError(f"said {frame.kind} to its twin, which makes no sense")

    def _become(self, connection: Connection, document: dict[str, Any]) -> None:
        """The same as the shard is."""
        shard = self._shard
        shard.set_up(document["set_up"], lambda _: None)
        holding = shard.holding
        part = blank(holding.partition, holding.shard, document["part"])
        self._body(connection, Kind.STATE, part.body())
        shard.load(part, 0, document["version"])
        self._load_rows(connection)
        shard.incarnation, shard.number = document["incarnation"], document["number"]
        self._decided.clear()
        self.past.clear()
        self.scales.clear()
        self._keep(document)

    def _keep(self, document: dict[str, Any]) -> None:
        self.gate = document.get("gate") or self.gate
        for plain in document.get("entries", ()):
            entry = Entry.from_json(plain)
            self._decided[entry.number] = entry

    def _apply(self, connection: Connection, document: dict[str, Any], number: int) -> None:
        entry, shard = Entry.from_json(document["entry"]), self._shard
        total = [torch.empty_like(weight) for weight in shard.holding.weights]
        if entry.pushes and total:
            self._body(connection, Kind.GRADIENTS, total)
        rows = shard.tables.blank_sums(document["rows"])
        if rows:
            self._body(connection, Kind.ROW_GRADIENTS, flat(rows))
        connection.send(Kind.ACK, {"number": number})
        shard.repeat(entry, total, document["scale"], rows)
        self.past.append(entry)
        self.scales[entry.number] = document["scale"]
        self.scales.pop(entry.number - _KEPT, None)
        for known in [known for known in self._decided if known <= entry.number]:
            del self._decided[known]

    def _load_rows(self, connection: Connection) -> None:
        """All tables, in pieces; the last one is none."""
        while True:
            frame = connection.receive(self._settings.deadline)
            if frame is None or frame.kind != Kind.ROW_LOAD:
                raise PeerError("did not send the rows that were due")
            if not frame.size:
                return
            fields = frame.fields()
            state = blank_state(fields.get("outline"), frame.size)
            connection.take(list(state.values()))
            self._shard.tables.load(fields["table"], state, more=bool(fields["more"]))

    def _body(self, connection: Connection, kind: Kind, into: list[torch.Tensor]) -> None:
        frame = connection.receive(self._settings.deadline)
        if frame is None or frame.kind != kind:
            raise PeerError("did not send the tensors that were due")
        connection.take(into)
