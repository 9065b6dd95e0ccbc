"""One shard: trainer slots, staged gradients, ordered execution."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame, Segment
from echelon.comm.ps.layout import Layout, Partition, Room
from echelon.comm.ps.link import Sender
from echelon.comm.ps.messages import CHUNK, Chunk, Kind, ShardAddress, pack_chunk, part, to_bytes
from echelon.comm.ps.state import Part
from echelon.core.config import OptimizerSection
from echelon.core.errors import PeerError, TrainingError
from echelon.server.decisions import Entry, Give, Staged
from echelon.server.weights import Done, Flats, Stale, Sums, Tables

# --- shard ---
# One shard: its weights, the trainers' seats, and what the gate has it do with both.

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


# --- holding ---
# What a shard is set up with: a part of the parameters, and the rules they are trained by.

Lender = Callable[[int], Segment | None]
"""Memory of so many bytes for all shards' weights; None: there is none to be had."""


class Holding:
    """A shard's part of the weights, and where it lies."""

    def __init__(self, shard: int, shards: int, document: Any, lender: Lender) -> None:
        match document:
            case {"layout": list(layout), "rules": {"optimizer": dict(optimizer), **_rest}}:
                self.layout = Layout.from_json(layout)
                self.rules: Mapping[str, Any] = document["rules"]
            case _:
                raise PeerError("a set-up must have a layout and rules")
        self.digest = digest_of(document)
        self.document = document
        self.shard = shard
        self.partition = Partition(self.layout, shards)
        self.together = self._is_together()
        self.replicated = bool(self.rules.get("replicas", 0))
        seen = (self.together or self.rules.get("live") is True) and not self.replicated
        self.segment = lender(self.layout.bytes) if seen else None
        weights = None
        if self.segment is not None:
            room = Room(self.layout, self.segment.tensor)
            weights = self.partition.cut(shard, room.flats)
        section = OptimizerSection.model_validate(optimizer)
        piece = CHUNK if weights is None else 2 * CHUNK  # nothing has to be under way meanwhile
        self.flats = Flats(self.partition, shard, section, weights, piece)
        self.tables = Tables(self.rules.get("tables", []))

    @property
    def weights(self) -> Sequence[Tensor]:
        return self.flats.weights

    @property
    def shared(self) -> bool:
        """Whether trainers of this host see these weights themselves."""
        return self.segment is not None

    def cut(self, memory: Tensor) -> list[Tensor]:
        """This shard's ranges in a trainer's memory for the whole layout."""
        return self.partition.cut(self.shard, Room(self.layout, memory).flats)

    def _is_together(self) -> bool:
        """Whether nobody computes while an update is made."""
        return self.rules.get("staleness", 0) == 0 and self.rules.get("quorum") in (None, "all")


def digest_of(document: Any) -> str:
    return hashlib.sha256(to_bytes(document)).hexdigest()


# --- seats ---
# A trainer's place at a shard: where its gradients are staged, and how it gets weights.
#
# shared   both are memory that trainer and shard see; weights are the shard's own     no copy
# pinned   the same, but the weights are the trainer's: copied while in the cache
# wire     gradients are received, weights are sent, chunk by chunk


class Seat:
    """In shared memory: `gradients` per range of this shard. Nothing has to be sent."""

    base: Sequence[Tensor] | None = None
    """The weights as this trainer has them, where they are kept."""
    chunked = False
    """Whether it wants to know of chunks as they are done."""

    def __init__(self, connection: Connection, gradients: Sequence[Tensor]) -> None:
        self.gradients = list(gradients)
        self._connection = connection

    def stage(self, chunks: Sequence[Chunk], frame: Frame) -> None:
        """Take the body of a frame: these chunks' gradients."""
        if chunks or frame.size:
            raise PeerError("gradients were sent that are in shared memory")

    def moved(self, weights: Sequence[Tensor]) -> None:
        """The shard's weights are in other memory from now on."""

    def done(self, chunk: Done) -> None:
        """These weights are the new ones."""

    def whole(self) -> None:
        """All of them are."""

    def tell(self, kind: Kind, seq: int, head: bytes) -> None:
        """The answer, behind the weights."""
        self._connection.send(kind, head, seq=seq)

    def refuse(self, seq: int, head: bytes) -> None:
        """An outcome without weights."""
        self._connection.send(Kind.OUTCOME, head, seq=seq)

    def hang_up(self) -> None:
        """Whoever listens to the trainer does the rest, and the trainer sees that it is lost."""
        self._connection.close()

    def close(self) -> None:
        """The connection is closed already."""


class PinnedSeat(Seat):
    chunked = True

    def __init__(
        self,
        connection: Connection,
        gradients: Sequence[Tensor],
        theirs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        super().__init__(connection, gradients)
        self.base = self._theirs = list(theirs)
        self._weights = weights

    def moved(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights

    def done(self, chunk: Done) -> None:
        at, start, stop = chunk
        self._theirs[at][start:stop].copy_(self._weights[at][start:stop])

    def whole(self) -> None:
        torch._foreach_copy_(self._theirs, list(self._weights))


class WireSeat(Seat):
    """`apart`: others' updates go on while weights are sent, so a copy of them is."""

    chunked = True

    def __init__(
        self,
        connection: Connection,
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        apart: bool,
    ) -> None:
        super().__init__(connection, gradients)
        self._sent = [w.clone() for w in weights] if apart else []
        self._apart = apart
        if apart:
            self.base = self._sent
        self.moved(weights)
        self._small = sum(w.nbytes for w in weights) <= CHUNK
        self._sender: Sender | None = None
        self._open: Chunk | None = None

    def moved(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        if not self._apart:
            self._sent = self._weights

    def stage(self, chunks: Sequence[Chunk], frame: Frame) -> None:
        if chunks or frame.size:
            self._connection.take([part(self.gradients, chunk) for chunk in chunks])

    def done(self, chunk: Done) -> None:
        at, start, stop = chunk
        if self._apart:
            self._sent[at][start:stop].copy_(self._weights[at][start:stop])
        if not self._small:
            self._extend(Chunk(at, start, stop))

    def whole(self) -> None:
        if self._apart:
            torch._foreach_copy_(self._sent, self._weights)
        if not self._small:
            for at, held in enumerate(self._sent):
                step = CHUNK // held.itemsize
                for start in range(0, held.numel(), step):
                    self._extend(Chunk(at, start, min(start + step, held.numel())))

    def tell(self, kind: Kind, seq: int, head: bytes) -> None:
        if self._small:
            self._connection.send(kind, head, self._sent, seq=seq)
            return
        self._send_open()
        self._background.submit(lambda: self._connection.send(kind, head, seq=seq))

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _extend(self, chunk: Chunk) -> None:
        """Neighbours travel together, up to a message's size."""
        before = self._open
        if before is not None:
            size = (chunk.stop - before.start) * self._sent[chunk.range].itemsize
            if before.range == chunk.range and before.stop == chunk.start and size <= CHUNK:
                chunk = Chunk(chunk.range, before.start, chunk.stop)
            else:
                self._send_open()
        self._open = chunk

    def _send_open(self) -> None:
        if self._open is not None:
            chunk, self._open = self._open, None
            body = [part(self._sent, chunk)]
            head = pack_chunk(chunk)
            self._background.submit(lambda: self._connection.send(Kind.WEIGHTS, head, body))

    @property
    def _background(self) -> Sender:
        if self._sender is None:
            self._sender = Sender("weights")
        return self._sender


# --- order ---
# Entries are carried out one after the other, by whichever thread comes by.
#
# No thread waits for another one to wake up: whoever brings an entry carries it out, and what
# others bring meanwhile. So a trainer alone is answered by the thread that heard it.


class Later(Exception):
    """An entry was put back: it cannot be carried out before somebody is back who was lost."""


class Order:
    def __init__(
        self, carry_out: Callable[[Entry], None], may: Callable[[Entry], bool] = lambda _: True
    ) -> None:
        self._carry_out, self._may = carry_out, may
        self._entries: deque[Entry] = deque()
        self._busy = threading.Lock()

    def add(self, entry: Entry) -> None:
        """By whoever knows that it is the next one; `work` has to follow."""
        self._entries.append(entry)

    def work(self) -> None:
        """Leave no entry behind that nobody is at work on."""
        while self._is_due() and self._busy.acquire(blocking=False):
            try:
                while self._is_due():
                    self._carry_out(self._entries.popleft())
            except Later:
                return
            finally:
                self._busy.release()

    def put_back(self, entry: Entry) -> None:
        """By whoever carries it out, and could not yet."""
        self._entries.appendleft(entry)

    @property
    def pending(self) -> list[Entry]:
        """What nobody has begun; for whoever keeps it quiet."""
        return list(self._entries)

    def _is_due(self) -> bool:
        entries = self._entries
        try:
            return self._may(entries[0])
        except IndexError:  # another thread was faster
            return False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No entry is carried out meanwhile; what comes is, afterwards."""
        with self.still():
            yield
        self.work()

    @contextmanager
    def still(self) -> Iterator[None]:
        """The same, but somebody else has to `work` afterwards."""
        with self._busy:
            yield

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """The same, and those that are not begun are dropped."""
        with self._busy:
            self._entries.clear()
            yield


# --- settings ---
# What a server process is told when it starts. Everything about the model comes from trainers.


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
