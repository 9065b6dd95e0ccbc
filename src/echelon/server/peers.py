"""Between server processes: gate link, replica.

Shards and the gate: who has what staged, and what all do next.

    shard k                                     shard 0, the gate
    HELLO number, incarnation, staged  ───────▶ resends what comes after that number
    STAGED member, seq                 ───────▶ the push is whole here: is it everywhere?
    ◀─────── ENTRY number, version, pushes, whom to give the weights
    SQUARES number, square             ───────▶ where an update is clipped by its norm
    ◀─────── FACTOR number, scale

A shard that lost its gate, or the other way round, says hello again. Entries of another incarnation
(an upload) than a shard's own are not for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame, Segment, connect
from echelon.comm.channel.sockets import Address
from echelon.comm.ps import messages
from echelon.comm.ps.link import is_here
from echelon.comm.ps.messages import Kind, blank_state
from echelon.comm.ps.state import blank
from echelon.core.errors import PeerError
from echelon.server.decisions import Entry
from echelon.server.shard import Reflection, ServerSettings, Shard
from echelon.server.weights import Stale, Sums, flat, lengths

# --- peers ---

_PAUSE = 0.05
_PATIENCE = 2.0
_LOOK = 0.3
_KEPT = 16


class GateLink:
    """Of a shard that is not the gate. Its thread carries the gate's entries out."""

    def __init__(self, settings: ServerSettings, shard: Shard, halted: Callable[[], bool]) -> None:
        self._settings, self._shard, self._halted = settings, shard, halted
        self._connection: Connection | None = None
        self._squares: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        """For a gate that takes over, and has to know again."""
        shard.measure = self._measure

    def run(self) -> None:
        """Talk to the gate, whoever it is, until this process ends."""
        while not self._halted():
            try:
                self._connection = dial_gate(self._settings, f"shard {self._shard.index}")
                self.greet()
                while not self._halted():
                    if (frame := self._connection.receive(_LOOK)) is not None:
                        self._hear(frame)
                    self._shard.order.work()
            except PeerError:  # it is another one's turn
                time.sleep(_PAUSE)
            finally:
                self.close()

    def greet(self) -> None:
        """Say how far this shard is; also after an upload."""
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
        self._send(Kind.STAGED, {"member": member, "seq": seq})

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, kind: Kind, head: dict[str, Any]) -> None:
        """Nothing is lost if the gate is: the next one is told all of it."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(kind, head)
            except PeerError:
                return

    def _hear(self, frame: Frame) -> None:
        if frame.kind == Kind.FACTOR:  # of an update that is made here already
            return
        if frame.kind != Kind.ENTRY:
            raise PeerError(f"the gate sent a frame of kind {frame.kind}")
        fields = frame.fields()
        if fields.pop("incarnation", None) == self._shard.incarnation:
            entry = Entry.from_json(fields)
            if entry.number > self._shard.heard:  # a gate that takes over tells some again
                self._shard.add(entry)

    def _measure(self, entry: Entry, square: float) -> float:
        """In this link's own thread, so that it has to listen itself."""
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
    """The memory of all shards' weights, from the gate, if it is on this host and has any."""
    name = settings.shards[0].name
    if not is_here(name):
        return None
    role = f"shard {settings.shard} asks"
    connection = connect(name, settings.key, role=role, deadline=_PATIENCE)
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


def dial_gate(settings: ServerSettings, role: str) -> Connection:
    address = settings.shards[0]
    where: Address = address.name if is_here(address.name) else (address.host, address.port)
    connection = connect(where, settings.key, role=role, deadline=_PATIENCE)
    connection.limit = messages.LIMIT
    return connection


# --- mirror ---
# What a shard passes on to its twin, before anybody hears of it.
#
#     shard                                                twin
#     ◀────────────────────────────────────────── HELLO    (a new one, or one that lost its shard)
#     MIRROR   all there is, then its tensors ───────────▶ becomes the same
#     DECIDED  the gate's state, and entries  ───────────▶ (shard 0 alone)
#     APPLIED  an entry, then its gradient    ───────────▶ received whole
#     ◀────────────────────────────────────── ACK number   now trainers are answered
#                                                          applies the same, in the same order
#
# A twin that is lost is done without, until another one says hello. What only the shard that died
# had, trainers still have: they send a push again that they got no outcome of.

Grads = Sequence[Tensor]
Snapshot = Callable[[], dict[str, Any]]
"""The gate's state and what it has decided but not carried out; nothing where there is no gate."""


class Mirror(Reflection):
    """Of a shard that has, or may get, a twin."""

    def __init__(self, shard: Shard, deadline: float) -> None:
        self._shard, self._deadline = shard, deadline
        self.snapshot: Snapshot = dict
        self.gated: Callable[[], AbstractContextManager[Any]] = nullcontext
        """A context in which the gate, if it is here, decides nothing."""
        self.aside: Callable[[], None] = lambda: None
        """Has another thread carry out what came meanwhile."""
        self._twin: Connection | None = None
        self._acked = 0
        self._said = 0
        self._changed = threading.Condition()
        self._saying = threading.Lock()
        self._sum: list[Tensor] = []

    @property
    def attached(self) -> bool:
        return self._twin is not None

    def talk(self, connection: Connection) -> None:
        """All that a twin says, in a thread of its own."""
        connection.limit = messages.LIMIT
        try:
            while (frame := connection.receive()) is not None:
                self._hear(connection, frame)
        finally:
            with self._changed:
                if self._twin is connection:
                    self._twin = None
                self._changed.notify_all()

    def refresh(self) -> None:
        """All is new, after an upload."""
        if (twin := self._twin) is not None:
            self._attach(twin)

    def decided(self, entries: Sequence[Entry], state: dict[str, Any], *, wait: bool) -> None:
        """What the gate decided, before anybody else hears of it (`wait`)."""
        document = {"entries": [entry.to_json() for entry in entries], "gate": state}
        said = self._say(Kind.DECIDED, document)
        if wait:
            self._wait(said)

    def send(
        self, entry: Entry, pushes: Sequence[Grads], scale: float, rows: Sums
    ) -> Callable[[], None]:
        """What is about to be applied: one sum, or none where weights are only given away. Nobody
        hears of it before the twin has it."""
        if self._twin is None:
            return lambda: None
        document = {"entry": entry.to_json(), "scale": scale, "rows": lengths(rows)}
        total = pushes[0] if pushes else ()
        said = self._say(Kind.APPLIED, document, total, flat(rows))
        return lambda: self._wait(said)

    def _hear(self, connection: Connection, frame: Frame) -> None:
        match frame.kind, frame.fields():
            case Kind.HELLO, _:
                self._attach(connection)
            case Kind.ACK, {"number": int(number)}:
                with self._changed:
                    self._acked = max(self._acked, number)
                    self._changed.notify_all()
            case kind, _:
                raise PeerError(f"said {kind} to its shard, which makes no sense")

    def _attach(self, connection: Connection) -> None:
        """Not to be followed by work in this thread, which is the one that hears the twin."""
        self._copy(connection)
        self.aside()

    def _copy(self, connection: Connection) -> None:
        shard = self._shard
        with shard.order.still(), self.gated():
            if not shard.is_set_up:
                self._twin = connection
                return
            holding = shard.holding
            part = holding.flats.part()
            document = {
                "set_up": holding.document,
                "part": part.head(),
                "incarnation": shard.incarnation,
                "version": shard.version,
                "number": shard.number,
                **self.snapshot(),
            }
            connection.send(Kind.MIRROR, {}, [messages.to_bytes(document)])
            connection.send(Kind.STATE, {}, part.body())
            for head, state in shard.tables.pieces():
                connection.send(Kind.ROW_LOAD, head, state)
            connection.send(Kind.ROW_LOAD, {})
            with self._changed:
                self._twin = connection
                self._acked = self._said

    def _say(self, kind: Kind, document: Any, body: Grads = (), rows: Grads = ()) -> int:
        """Number of what was said; nothing is said where nobody listens."""
        with self._saying:  # what belongs together stays so, and numbers are said in their order
            with self._changed:
                self._said += 1
                said, twin = self._said, self._twin
            if twin is not None:
                try:
                    twin.send(kind, {"number": said}, [messages.to_bytes(document)])
                    if body:
                        twin.send(Kind.GRADIENTS, {}, list(body))
                    if rows:
                        twin.send(Kind.ROW_GRADIENTS, {}, list(rows))
                except PeerError:
                    self._lose(twin)
        return said

    def _wait(self, said: int) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._twin is None or self._acked >= said, self._deadline
            )
            twin = self._twin
        if not done and twin is not None:
            self._lose(twin)

    def _lose(self, twin: Connection) -> None:
        twin.close()
        with self._changed:
            if self._twin is twin:
                self._twin = None
            self._changed.notify_all()

    def reduced(
        self, pushes: Sequence[Grads], scale: float, stale: Sequence[Stale | None]
    ) -> tuple[Grads, float]:
        """Σ pushes in memory of its own, added in the order and way `Flats.apply` does."""
        first, *others = pushes
        if not self._sum:
            self._sum = [torch.empty_like(grad) for grad in first]
        total = self._sum
        if any(stale):
            return self._compensated(pushes, scale, stale), 1.0
        torch._foreach_copy_(total, list(first))
        for push in others:
            torch._foreach_add_(total, list(push))
        return total, scale

    def _compensated(
        self, pushes: Sequence[Grads], scale: float, stale: Sequence[Stale | None]
    ) -> Grads:
        weights = self._shard.holding.weights
        torch._foreach_zero_(self._sum)
        for push, past in zip(pushes, stale, strict=True):
            mine = [grad.mul(scale) for grad in push]
            if past is not None:
                for grad, weight, base in zip(mine, weights, past.base, strict=True):
                    past.compensate_(grad, weight, base)
            torch._foreach_add_(self._sum, mine)
        return self._sum


# --- twin ---
# A process that does what its shard does, and takes its place when it is lost.
#
# Whatever comes is received whole before any of it counts, so the last thing a dying shard said is
# there or it is not. Promoted, it has what every trainer was ever told of; what was decided but
# not applied is carried out as soon as the trainers have sent their pushes again.

_TWIN_PAUSE = 0.02
_TWIN_PATIENCE = 2.0
_LARGEST = 1 << 48
_TWIN_KEPT = 256


class Twin:
    def __init__(self, settings: ServerSettings, shard: Shard, over: Callable[[], bool]) -> None:
        self._settings, self._shard, self._over = settings, shard, over
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self.gate: dict[str, Any] | None = None
        """The state of the gate, if the shard has it."""
        self._decided: dict[int, Entry] = {}
        self.past: deque[Entry] = deque(maxlen=_TWIN_KEPT)
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
                time.sleep(_TWIN_PAUSE)

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
        connection = connect(where, self._settings.key, role=role, deadline=_TWIN_PATIENCE)
        connection.limit = _LARGEST  # what is taken has to have just the size that is due
        return connection

    def _hear(self, connection: Connection, frame: Frame) -> None:
        number = frame.fields().get("number", 0)
        document = messages.take(connection, frame)
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
        self.scales.pop(entry.number - _TWIN_KEPT, None)
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
