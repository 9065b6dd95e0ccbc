"""One shard: a part of the weights, the trainers that push to it, and the gate's entries in order.

    Shard      stages pushes in seats, applies entries to its holding, answers through the seats
    Order      the queue of entries; one thread at a time carries them out
    Holding    the weights, optimizer state and rows of this shard, and the rules of training
    Seat       per trainer: where its gradients are staged, and how it gets weights (seats.py)

A staged push changes nothing. Only an entry does: it names the pushes that make an update, and the
members that get the weights afterwards.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from echelon.comm.channel import Segment
from echelon.comm.ps.layout import Layout, Partition, Room
from echelon.comm.ps.messages import CHUNK, Kind, ShardAddress, to_bytes
from echelon.comm.ps.state import Part
from echelon.core.config import OptimizerSection
from echelon.core.errors import PeerError, TrainingError
from echelon.server.decisions import Entry, Give, Staged
from echelon.server.seats import Seat
from echelon.server.weights import Done, Flats, Stale, Sums, Tables


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings a server process is started with. All about the model comes from trainers."""

    shard: int
    shards: tuple[ShardAddress, ...]
    """All of them, in order; shard 0 is the gate."""
    key: bytes = field(repr=False)
    """The run's key: connections of peers without it are refused."""
    deadline: float = 30.0
    """Seconds to wait for a peer before it counts as lost."""
    twin: bool = False
    """Whether this process stands by until SIGUSR1 promotes it."""

    @property
    def address(self) -> ShardAddress:
        return self.shards[self.shard]


_NOTHING = -1, None


class Shard:
    """One shard, shared by all threads of its process.

    Entries arrive in the gate's order. The thread that adds one calls `order.work` afterwards.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.order = Order(self._carry_out, self._may)
        self.incarnation = self.version = self.number = 0
        """`incarnation`: the upload these weights come from, 0 if they do not count; `version`: of
        the weights; `number`: of the last entry that was carried out."""
        self.heard = 0
        """Number of the last entry that was added."""
        self.measure: Measure | None = None
        self.gave_up: Callable[[], None] = lambda: None
        """Called when an update cannot be finished and the weights are given up."""
        self.mirror: Reflection = Reflection()
        self.seconds = self.waited = 0.0
        """Spent applying; spent waiting for the scale of a clipped update."""
        self.rounds = 0
        """Updates applied."""
        self._anew = 0
        """Number of the last entry with which a generation began."""
        self._holding: Holding | None = None
        self._seats: dict[int, Seat] = {}
        """Per member, the seat of its latest session."""
        self._staged: dict[int, tuple[int, Seat]] = {}
        """Per member, the number of its last complete push and the seat that holds it."""
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
        """Set the shard up by the first trainer's document, and call `prepare` before it counts.

        Later calls only check that the document is the same. Raises TrainingError if it is not.
        """
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
        """Load an upload's weights and state, and drop all entries and staged pushes."""
        with self.order.emptied():
            self.incarnation = 0
            # The shared memory of all weights belongs to shard 0. A process that has replaced that
            # shard has made new memory: borrow it, and have the seats send weights from there.
            if lender is not None and self.index and self.holding.shared:
                self._holding = Holding(self.index, self.count, self.holding.document, lender)
                for seat in list(self._seats.values()):
                    seat.moved(self.holding.weights)
            self.holding.flats.load(part)
            self.tables.clear()
            self._staged.clear()
            self.incarnation, self.version, self.number = incarnation, version, 0
            self._anew = self.heard = 0

    def sit(self, member: int, seat: Seat) -> None:
        self._seats[member] = seat

    def stand_up(self, member: int, seat: Seat) -> None:
        """Free a member's seat. Its staged push stays: it may still be part of an update."""
        if self._seats.get(member) is seat:
            del self._seats[member]

    def staged(self, member: int, seq: int, seat: Seat) -> None:
        """Note that all gradients of a push are in the member's seat."""
        self._staged[member] = seq, seat

    def staged_pushes(self) -> list[Staged]:
        return [Staged(member, seq) for member, (seq, _) in self._staged.items()]

    def add(self, entry: Entry) -> None:
        """Queue the gate's next entry. The caller calls `order.work` afterwards."""
        if entry.anew:
            self._anew = entry.number
        self.heard = entry.number
        self.order.add(entry)

    def tell(self, give: Give) -> None:
        """Send an outcome that comes without weights."""
        seat = self._seats.get(give.member)
        if seat is not None and give.outcome is not None:
            with suppress(PeerError):  # the session's thread notices the lost connection
                seat.refuse(give.seq, give.outcome.pack())

    def repeat(self, entry: Entry, total: Sequence[Tensor], scale: float, rows: Sums) -> None:
        """Do on a twin what its shard did with this entry: `total` is the sum it applied."""
        if entry.pushes:
            begin = time.perf_counter()
            for _ in self._chunks(entry, [total], scale, ()):
                continue
            self.tables.repeat(entry, rows, scale if entry.measured else entry.scale)
            self.seconds += time.perf_counter() - begin
            self.rounds += 1
        self.version, self.number = entry.version, entry.number

    def figures(self) -> dict[str, float]:
        found = {"apply_seconds": self.seconds, "rounds": self.rounds, "waited": self.waited}
        rows = {} if self._holding is None else self.tables.figures()
        return {key: float(value) for key, value in found.items()} | rows

    # Carrying out an entry

    def _carry_out(self, entry: Entry) -> None:
        """Apply an entry's update, then give the weights to the members it names.

        Seats that send or copy weights get them chunk by chunk while the update is applied, unless
        some parameters have no gradient and are skipped: then they get all of them afterwards.
        """
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
            with suppress(PeerError):  # the session's thread notices the lost connection
                seat.tell(kind, give.seq, head)

    def _apply(self, entry: Entry, receivers: Sequence[Seat]) -> Callable[[], None]:
        """Apply an entry's pushes, and pass finished chunks to `receivers`.

        Returns a function that waits until the twin has what it needs. Members may get their
        answers only after that.
        """
        pushes = [self._gradients(push) for push in entry.pushes]
        begin = time.perf_counter()
        scale, stale = entry.scale, [] if entry.measured else self._stale(entry)
        # With replicas the sum needs memory of its own. Staged gradients must not change: an entry
        # that is put back is applied to them once more.
        if self.holding.replicated:
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

    def _measured(self, entry: Entry, pushes: Sequence[Sequence[Tensor]]) -> float:
        """Add all pushes to the first, in place, and return the scale that clips their sum."""
        assert self.measure is not None
        square = self.holding.flats.reduce(pushes) + self.tables.reduce(entry.pushes)
        return self.measure(entry, square)

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

    def _gradients(self, push: Staged) -> Sequence[Tensor]:
        seq, seat = self._staged[push.member]
        assert seq == push.seq, f"push {push} is due, push {seq} is here"
        return seat.gradients

    def _stale(self, entry: Entry) -> list[Stale | None]:
        found: list[Stale | None] = []
        for push, strength in zip(entry.pushes, entry.strengths, strict=False):
            base = self._staged[push.member][1].base
            found.append(Stale(base, strength) if base is not None and strength else None)
        return found

    def _may(self, entry: Entry) -> bool:
        """Return whether an entry can be carried out now.

        After a shard was lost, trainers send their pushes again: wait for them. Pushes of an older
        generation never come; such an entry is due, and fails.
        """
        return entry.number <= self._anew or self._has(entry)

    def _has(self, entry: Entry) -> bool:
        staged = self._staged
        return all(staged.get(push.member, _NOTHING)[0] == push.seq for push in entry.pushes)

    def _give_up(self) -> None:
        """Drop these weights: they lack an update that cannot be made any more.

        Trainers lose their connections, and start again from a checkpoint.
        """
        self.incarnation = 0
        for seat in list(self._seats.values()):
            seat.hang_up()
        self.gave_up()


Measure = Callable[[Entry, float], float]
"""Squared norm of this shard's part of a gradient sum → scale of the whole sum."""


class Abandoned(Exception):
    """Raised if an update cannot be finished, because another shard is lost."""


class Reflection:
    """Replication to no twin: the interface of `Mirror` in replication.py, which replaces it."""

    def reduced(
        self,
        pushes: Sequence[Sequence[Tensor]],
        scale: float,
        stale: Sequence[Stale | None],  # noqa: ARG002
    ) -> tuple[Sequence[Tensor], float]:
        """Return one sum for all pushes, which may be changed, and the scale it still needs."""
        return pushes[0], scale

    def send(
        self,
        entry: Entry,  # noqa: ARG002
        pushes: Sequence[Sequence[Tensor]],  # noqa: ARG002
        scale: float,  # noqa: ARG002
        rows: Sums,  # noqa: ARG002
    ) -> Callable[[], None]:
        """Send what is about to be applied, and return a function that waits for it to arrive."""
        return lambda: None


class Order:
    """A queue of entries, carried out one after the other by the threads that bring them.

    No thread waits for another one to wake up: the thread that brings an entry carries it out,
    along with those that other threads bring meanwhile. So a single trainer is answered by the
    thread that heard it.
    """

    def __init__(
        self, carry_out: Callable[[Entry], None], may: Callable[[Entry], bool] = lambda _: True
    ) -> None:
        self._carry_out, self._may = carry_out, may
        self._entries: deque[Entry] = deque()
        self._busy = threading.Lock()

    def add(self, entry: Entry) -> None:
        """Append the next entry. The caller calls `work` afterwards."""
        self._entries.append(entry)

    def work(self) -> None:
        """Carry out all entries that are due, unless another thread is at work on them.

        That thread looks at the queue again after it has released the lock, so no entry is left.
        """
        while self._is_due() and self._busy.acquire(blocking=False):
            try:
                while self._is_due():
                    self._carry_out(self._entries.popleft())
            except Later:
                return
            finally:
                self._busy.release()

    def put_back(self, entry: Entry) -> None:
        """Return an entry to the front of the queue; called while it is being carried out."""
        self._entries.appendleft(entry)

    @property
    def pending(self) -> list[Entry]:
        """Entries that are not begun. Read it inside `still` or `quiet`."""
        return list(self._entries)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Carry no entry out inside this context, and catch up at its end."""
        with self.still():
            yield
        self.work()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Carry no entry out inside this context. The caller has `work` called afterwards."""
        with self._busy:
            yield

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Drop all entries, and carry none out inside this context."""
        with self._busy:
            self._entries.clear()
            yield

    def _is_due(self) -> bool:
        entries = self._entries
        try:
            return self._may(entries[0])
        except IndexError:  # another thread was faster
            return False


class Later(Exception):
    """Raised after an entry was put back: it needs a peer that is lost at the moment."""


class Holding:
    """The contents of a shard: its part of the parameters, and the rules they are trained by.

    Raises PeerError if the document is invalid.
    """

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
        # Small pieces, so that the first can travel while the next is applied. Shared weights do
        # not travel.
        piece = CHUNK if weights is None else 2 * CHUNK
        self.flats = Flats(self.partition, shard, section, weights, piece)
        self.tables = Tables(self.rules.get("tables", []))

    @property
    def weights(self) -> Sequence[Tensor]:
        return self.flats.weights

    @property
    def shared(self) -> bool:
        """Whether trainers on this host read these weights in shared memory."""
        return self.segment is not None

    def cut(self, memory: Tensor) -> list[Tensor]:
        """Return this shard's ranges of a trainer's memory, which has room for all parameters."""
        return self.partition.cut(self.shard, Room(self.layout, memory).flats)

    def _is_together(self) -> bool:
        """Whether no trainer computes while an update is applied."""
        return self.rules.get("staleness", 0) == 0 and self.rules.get("quorum") in (None, "all")


Lender = Callable[[int], Segment | None]
"""Returns shared memory of so many bytes for all shards' weights, or None if there is none."""


def digest_of(document: Any) -> str:
    return hashlib.sha256(to_bytes(document)).hexdigest()
