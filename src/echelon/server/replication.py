"""Replication: a shard's twin, a process that does all that the shard does and can take its place.

    shard (Mirror)                                       twin (Twin)
    ◀────────────────────────────────────────── HELLO    (a new one, or one that lost its shard)
    MIRROR   all there is, then its tensors ───────────▶ becomes the same
    DECIDED  the gate's state, and entries  ───────────▶ (shard 0 alone)
    APPLIED  an entry, then its gradient    ───────────▶ received whole
    ◀────────────────────────────────────── ACK number   now trainers are answered
                                                         applies the same, in the same order

The twin receives a message whole before any of it counts, so the last message of a dying shard is
there or it is not. A promoted twin has all updates that any trainer has heard of. Entries that were
decided but not applied are carried out once the trainers have sent their pushes again.

A shard that loses its twin goes on without, until another one says HELLO. Gradients that only a
lost shard had are not lost: trainers repeat every push that was not answered.
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

from echelon.comm.channel import Connection, Frame
from echelon.comm.ps import messages
from echelon.comm.ps.messages import Kind, blank_state
from echelon.comm.ps.state import blank
from echelon.core.errors import PeerError
from echelon.server.decisions import Entry
from echelon.server.gate_link import dial
from echelon.server.shard import Reflection, ServerSettings, Shard
from echelon.server.weights import Grads, Stale, Sums, flat, lengths

_PAUSE = 0.02
"""Seconds between attempts to reach the shard."""
_LARGEST = 1 << 48
"""Bytes: no limit on frames, because the twin only takes messages of the size it expects."""
_KEPT = 256
"""Entries and scales kept for other shards, which may lack them after a promotion."""


class Mirror(Reflection):
    """The shard's side: sends a twin, if there is one, all that the shard is about to do.

    Without a twin it sends nothing. `deadline`: seconds to wait for an ACK before the twin counts
    as lost.
    """

    def __init__(self, shard: Shard, deadline: float) -> None:
        self._shard, self._deadline = shard, deadline
        self.snapshot: Snapshot = dict
        self.gated: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns a context in which the gate, if it is here, decides nothing."""
        self.aside: Callable[[], None] = lambda: None
        """Has another thread carry out the entries that came while a twin got its copy."""
        self._twin: Connection | None = None
        self._acked = 0
        """Number of the last message that the twin has received."""
        self._said = 0
        """Number of the last message that was sent."""
        self._changed = threading.Condition()
        self._saying = threading.Lock()
        """Keeps the frames of a message together, and messages in the order of their numbers."""
        self._sum: list[Tensor] = []
        """Memory for sums of gradients."""

    @property
    def attached(self) -> bool:
        return self._twin is not None

    def talk(self, connection: Connection) -> None:
        """Hear a twin until it is lost. Runs in a thread of its own."""
        connection.limit = messages.LIMIT
        try:
            while (frame := connection.receive()) is not None:
                self._hear(connection, frame)
        finally:
            with self._changed:
                if self._twin is connection:
                    self._twin = None
                self._changed.notify_all()

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
        """Copy everything to a twin, and have entries carried out by another thread.

        This one hears the twin's ACKs: it would wait for itself.
        """
        self._copy(connection)
        self.aside()

    def _copy(self, connection: Connection) -> None:
        """Send a copy of the shard, while nothing is decided or carried out."""
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

    def refresh(self) -> None:
        """Copy everything to the twin again, after an upload."""
        if (twin := self._twin) is not None:
            self._attach(twin)

    def decided(self, entries: Sequence[Entry], state: dict[str, Any], *, wait: bool) -> None:
        """Send what the gate has decided. `wait`: return only when the twin has it."""
        document = {"entries": [entry.to_json() for entry in entries], "gate": state}
        said = self._say(Kind.DECIDED, document)
        if wait:
            self._wait(said)

    def send(
        self, entry: Entry, pushes: Sequence[Grads], scale: float, rows: Sums
    ) -> Callable[[], None]:
        """Send an entry that is about to be applied, with its sum of gradients.

        `pushes` is the one sum, or empty if the entry only gives weights away. Returns a function
        that waits until the twin has it; no trainer may be answered before.
        """
        if self._twin is None:
            return lambda: None
        document = {"entry": entry.to_json(), "scale": scale, "rows": lengths(rows)}
        total = pushes[0] if pushes else ()
        said = self._say(Kind.APPLIED, document, total, flat(rows))
        return lambda: self._wait(said)

    def _say(self, kind: Kind, document: Any, body: Grads = (), rows: Grads = ()) -> int:
        """Send a message, if there is a twin, and return its number."""
        with self._saying:
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
        """Wait until the twin has message `said`; give the twin up after the deadline."""
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
        """Return Σ pushes, in memory of its own, and the scale it still needs.

        Adds in the same order and way as `Flats.apply`, so that the result is the same to the bit.
        """
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


Snapshot = Callable[[], dict[str, Any]]
"""Returns the gate's state and the entries not carried out yet; nothing on shards but 0."""


class Twin:
    """The twin's side: follows its shard until `over` says that this process is promoted."""

    def __init__(self, settings: ServerSettings, shard: Shard, over: Callable[[], bool]) -> None:
        self._settings, self._shard, self._over = settings, shard, over
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        """Held while a message is handled."""
        self.gate: dict[str, Any] | None = None
        """The gate's state, if the shard is the gate's."""
        self._decided: dict[int, Entry] = {}
        """Entries that are decided but not applied here, by number."""
        self.past: deque[Entry] = deque(maxlen=_KEPT)
        """The last entries that were applied."""
        self.scales: dict[int, float] = {}
        """Scales of the last entries."""

    @property
    def decided(self) -> list[Entry]:
        """Entries that are decided but not applied here, in their order."""
        return [self._decided[number] for number in sorted(self._decided)]

    def run(self) -> None:
        """Follow the shard, and the process that takes its place, until this one is promoted."""
        while not self._over():
            try:
                self._follow()
            except PeerError:  # the shard is lost, or not there yet
                time.sleep(_PAUSE)

    def stop(self) -> None:
        """Hear nothing more. Returns once no message is being handled."""
        connection = self._connection
        if connection is not None:
            connection.close()
        with self._lock:
            return

    def _follow(self) -> None:
        shard = self._settings.shard
        connection = dial(self._settings, shard, f"twin {shard}", _LARGEST)
        self._connection = connection
        try:
            with self._lock:
                if self._over():
                    return
                # The shard may have gone on without its twin: this copy does not count until the
                # next MIRROR.
                self._shard.incarnation = 0
            connection.send(Kind.HELLO, {})
            while (frame := connection.receive()) is not None:
                with self._lock:
                    if self._over():
                        return
                    self._hear(connection, frame)
        finally:
            connection.close()

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
        """Copy the shard, tensors and rows included."""
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
        """Keep the gate's state and the entries it has decided."""
        self.gate = document.get("gate") or self.gate
        for plain in document.get("entries", ()):
            entry = Entry.from_json(plain)
            self._decided[entry.number] = entry

    def _apply(self, connection: Connection, document: dict[str, Any], number: int) -> None:
        """Receive an entry's sum, acknowledge it, and apply it."""
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
        """Receive the rows of all tables, in parts, up to an empty frame."""
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
