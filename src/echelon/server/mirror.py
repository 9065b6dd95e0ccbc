"""What a shard passes on to its twin, before anybody hears of it.

    shard                                                twin
    ◀────────────────────────────────────────── HELLO    (a new one, or one that lost its shard)
    MIRROR   all there is, then its tensors ───────────▶ becomes the same
    DECIDED  the gate's state, and entries  ───────────▶ (shard 0 alone)
    APPLIED  an entry, then its gradient    ───────────▶ received whole
    ◀────────────────────────────────────── ACK number   now trainers are answered
                                                         applies the same, in the same order

A twin that is lost is done without, until another one says hello. What only the shard that died
had, trainers still have: they send a push again that they got no outcome of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers import documents
from echelon.comm.servers.messages import Kind
from echelon.core.errors import PeerError
from echelon.server.entry import Entry
from echelon.server.flats import Stale
from echelon.server.shard import Reflection, Shard
from echelon.server.tables import Sums, flat, lengths

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
        connection.limit = documents.LIMIT
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
            connection.send(Kind.MIRROR, {}, [documents.to_bytes(document)])
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
                    twin.send(kind, {"number": said}, [documents.to_bytes(document)])
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
