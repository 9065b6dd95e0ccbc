"""One shard: its weights, the trainers' seats, and what the gate has it do with both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from echelon.comm.servers.messages import Kind
from echelon.comm.servers.part import Part
from echelon.core.errors import PeerError, TrainingError
from echelon.server.entry import Entry, Give, Staged
from echelon.server.flats import Done, Stale
from echelon.server.holding import Holding, Lender, digest_of
from echelon.server.order import Later, Order
from echelon.server.seats import Seat
from echelon.server.tables import Sums, Tables

_NOTHING = -1, None
Measure = Callable[[Entry, float], float]
"""The square of this shard's part of a sum → the scale of the whole."""


class Abandoned(Exception):
    """An update cannot be finished: what it takes is lost with another shard."""


class Reflection:
    """Of a shard without a twin; a `Mirror` has one."""

    def reduced(
        self,
        pushes: Sequence[Sequence[Tensor]],
        scale: float,
        stale: Sequence[Stale | None],  # noqa: ARG002
    ) -> tuple[Sequence[Tensor], float]:
        """Σ pushes in memory of its own, and its scale."""
        return pushes[0], scale

    def send(
        self,
        entry: Entry,  # noqa: ARG002
        pushes: Sequence[Sequence[Tensor]],  # noqa: ARG002
        scale: float,  # noqa: ARG002
        rows: Sums,  # noqa: ARG002
    ) -> Callable[[], None]:
        """Pass it on; what to wait for before anybody hears of it."""
        return lambda: None


class Shard:
    """Entries come in the gate's order; whoever brings one calls `order.work`."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.order = Order(self._carry_out, self._may)
        self.incarnation = self.version = self.number = 0
        self.heard = 0
        """Number of the last entry that was added; `number`: that was carried out."""
        self.measure: Measure | None = None
        self.gave_up: Callable[[], None] = lambda: None
        """Called when nothing can come of these weights any more."""
        self.mirror: Reflection = Reflection()
        self.seconds = self.waited = 0.0
        """Spent applying; spent waiting for the scale of a clipped update."""
        self.rounds = 0
        self._anew = 0
        """Number of the last entry with which a generation began."""
        self._holding: Holding | None = None
        self._seats: dict[int, Seat] = {}
        self._staged: dict[int, tuple[int, Seat]] = {}
        self._changing = threading.Lock()

    @property
    def holding(self) -> Holding:
        if self._holding is None:
            raise PeerError("this shard is not set up")
        return self._holding

    @property
    def is_set_up(self) -> bool:
        return self._holding is not None

    @property
    def tables(self) -> Tables:
        return self.holding.tables

    def set_up(
        self, document: Any, lender: Lender, prepare: Callable[[Holding], None] = lambda _: None
    ) -> None:
        """The first one makes it so (and whoever has to `prepare`), others have to say the same."""
        with self._changing:
            if self._holding is None:
                holding = Holding(self.index, self.count, document, lender)
                prepare(holding)
                self._holding = holding
            elif digest_of(document) != self._holding.digest:
                raise TrainingError("another model or other rules than the shard is set up with")

    def load(
        self, part: Part, incarnation: int, version: int, lender: Lender | None = None
    ) -> None:
        """Become what an upload says; what was under way is dropped.

        Memory that another shard lends may not be the one that trainers have seen: that of a
        shard which has taken the place of the first is another, and so trainers that are sent
        weights are sent those.
        """
        with self.order.emptied():
            self.incarnation = 0
            if lender is not None and self.index and self.holding.shared:
                self._holding = Holding(self.index, self.count, self.holding.document, lender)
                for seat in list(self._seats.values()):
                    seat.moved(self.holding.weights)
            self.holding.flats.load(part)
            self.tables.clear()
            self._staged.clear()
            self.incarnation, self.version, self.number = incarnation, version, 0
            self._anew = self.heard = 0

    def add(self, entry: Entry) -> None:
        """The next one, as the gate says; `order.work` has to follow."""
        if entry.anew:
            self._anew = entry.number
        self.heard = entry.number
        self.order.add(entry)

    def sit(self, member: int, seat: Seat) -> None:
        self._seats[member] = seat

    def stand_up(self, member: int, seat: Seat) -> None:
        """The member is gone; a push of its that is staged may still be part of an update."""
        if self._seats.get(member) is seat:
            del self._seats[member]

    def staged(self, member: int, seq: int, seat: Seat) -> None:
        self._staged[member] = seq, seat

    def staged_pushes(self) -> list[Staged]:
        return [Staged(member, seq) for member, (seq, _) in self._staged.items()]

    def tell(self, give: Give) -> None:
        """An outcome that comes without weights."""
        seat = self._seats.get(give.member)
        if seat is not None and give.outcome is not None:
            with suppress(PeerError):  # as below
                seat.refuse(give.seq, give.outcome.pack())

    def figures(self) -> dict[str, float]:
        found = {"apply_seconds": self.seconds, "rounds": self.rounds, "waited": self.waited}
        rows = {} if self._holding is None else self.tables.figures()
        return {key: float(value) for key, value in found.items()} | rows

    def _carry_out(self, entry: Entry) -> None:
        if not self._has(entry):
            self._give_up()
            return
        here = self._seats
        seats = [(give, here[give.member]) for give in entry.gives if give.member in here]
        receivers = [seat for _, seat in seats if seat.chunked]
        if entry.pushes:
            try:
                heard = self._apply(entry, () if entry.missing else receivers)
            except (Abandoned, PeerError):  # nothing was applied
                if self.holding.replicated:
                    self.order.put_back(entry)
                    raise Later from None
                self._give_up()
                return
        else:
            heard = self.mirror.send(entry, (), 1.0, {})
        heard()
        if not entry.pushes or entry.missing:
            for seat in receivers:
                seat.whole()
        self.version, self.number = entry.version, entry.number
        for member in entry.forget:
            self._staged.pop(member, None)
            self.tables.forget(member)
        for give, seat in seats:
            kind = Kind.GIVEN if give.outcome is None else Kind.OUTCOME
            head = b"" if give.outcome is None else give.outcome.pack()
            with suppress(PeerError):  # it is gone: whoever listens to it will notice
                seat.tell(kind, give.seq, head)

    def _give_up(self) -> None:
        """What these weights lack is nowhere else: trainers start again from a cut."""
        self.incarnation = 0
        for seat in list(self._seats.values()):
            seat.hang_up()
        self.gave_up()

    def repeat(self, entry: Entry, total: Sequence[Tensor], scale: float, rows: Sums) -> None:
        """What the shard did whose twin this is."""
        if entry.pushes:
            begin = time.perf_counter()
            for _ in self._chunks(entry, [total], scale, ()):
                continue
            self.tables.repeat(entry, rows, scale if entry.measured else entry.scale)
            self.seconds += time.perf_counter() - begin
            self.rounds += 1
        self.version, self.number = entry.version, entry.number

    def _apply(self, entry: Entry, receivers: Sequence[Seat]) -> Callable[[], None]:
        """Returns what has to be waited for before anybody hears of it."""
        pushes = [self._gradients(push) for push in entry.pushes]
        begin = time.perf_counter()
        scale, stale = entry.scale, [] if entry.measured else self._stale(entry)
        if self.holding.replicated:  # what trainers staged stays as it is: it may come again
            total, scale = self.mirror.reduced(pushes, scale, stale)
            pushes, stale = [total], []
        if entry.measured:
            scale, pushes = self._measured(entry, pushes), pushes[:1]
        rows, rate = self.tables.summed(entry), scale if entry.measured else entry.scale
        heard = self.mirror.send(entry, pushes, scale, rows)
        for done in self._chunks(entry, pushes, scale, stale):
            for seat in receivers:
                seat.done(done)
        self.tables.repeat(entry, rows, rate)
        self.seconds += time.perf_counter() - begin
        self.rounds += 1
        for push in entry.pushes:
            self._staged.pop(push.member, None)
        return heard

    def _chunks(
        self,
        entry: Entry,
        pushes: Sequence[Sequence[Tensor]],
        scale: float,
        stale: Sequence[Stale | None],
    ) -> Iterator[Done]:
        mean = 1 / entry.divisor if entry.measured else scale
        return self.holding.flats.apply(
            pushes,
            scale=mean,
            clip=scale / mean,
            factor=entry.factor,
            limit=entry.limit,
            missing=entry.missing,
            stale=stale,
        )

    def _measured(self, entry: Entry, pushes: Sequence[Sequence[Tensor]]) -> float:
        """Add all up, in the first one's memory; the scale that the sum's norm asks for."""
        assert self.measure is not None
        square = self.holding.flats.reduce(pushes) + self.tables.reduce(entry.pushes)
        return self.measure(entry, square)

    def _may(self, entry: Entry) -> bool:
        """After a shard was lost, pushes are sent again, unless their generation is over, too."""
        return entry.number <= self._anew or self._has(entry)

    def _has(self, entry: Entry) -> bool:
        staged = self._staged
        return all(staged.get(push.member, _NOTHING)[0] == push.seq for push in entry.pushes)

    def _stale(self, entry: Entry) -> list[Stale | None]:
        found: list[Stale | None] = []
        for push, strength in zip(entry.pushes, entry.strengths, strict=False):
            base = self._staged[push.member][1].base
            found.append(Stale(base, strength) if base is not None and strength else None)
        return found

    def _gradients(self, push: Staged) -> Sequence[Tensor]:
        seq, seat = self._staged[push.member]
        assert seq == push.seq, f"push {push} is due, push {seq} is here"
        return seat.gradients
