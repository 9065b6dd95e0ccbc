"""Gate → log → shards.

The gate's desk, at shard 0: it tells the gate what happens, and all shards what it decides.

PUSH, and STAGED of all other shards ─▶ gate.push ─▶ decisions ─▶ entries ─▶ log ─▶ shards
                                                                     └─▶ shard 0's own order
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.comm.channel import Connection
from echelon.comm.ps.messages import Kind, PushHead
from echelon.core.errors import PeerError
from echelon.core.types import Lease
from echelon.server.accounting import Record
from echelon.server.decisions import Decision, Entry, Push, translate
from echelon.server.gate import Gate
from echelon.server.peers import Mirror
from echelon.server.shard import Abandoned, ServerSettings, Shard

# --- desk ---

_LOOK = 0.5
_KEPT = 256


@dataclass(slots=True)
class _Push:
    """Of which not every shard has said that it is there."""

    seq: int
    head: PushHead | None = None
    shards: set[int] = field(default_factory=set)


class Desk:
    """Everything under one lock; what is to be carried out is, after it is released."""

    def __init__(self, shard: Shard, settings: ServerSettings) -> None:
        self._shard, self._settings = shard, settings
        self._changed = threading.Condition(threading.RLock())
        self._gate: Gate | None = None
        self._log = Log()
        self._pending: dict[int, _Push] = {}
        self._present: dict[int, object] = {}
        """Whom each member talks through now."""
        self._asking: dict[int, int] = {}
        """The number of each member's last push or pull."""
        self._squares: dict[int, dict[int, float]] = {}
        self._scales: dict[int, float] = {}
        """Of measured entries, for shards that missed it."""
        self._measures = False
        self.mirror: Mirror | None = None
        self._waking = threading.Event()
        shard.measure, shard.gave_up = self._measure, self._hang_up

    # Trainers.

    def prepare(self, rules: Mapping[str, Any], parameters: int) -> None:
        with self._changed:
            self._gate = Gate(rules, parameters)

    def arrived(self, member: int, conversation: object) -> None:
        """Through this conversation from now on: what it asked for before, it asks again."""
        with self._changed:
            self._present[member] = conversation
            self._take_back(member)
            if self._gate is not None:
                self._gate.back(member)

    def left(self, member: int, conversation: object) -> None:
        self._do(lambda: self._leave(member, conversation))

    def enter(self, generation: int, members: Sequence[int]) -> None:
        anew = generation > self.gate.generation
        self._do(lambda: self.gate.enter(time.monotonic(), generation, members))
        with self._changed:
            gone = self._asking.keys() - set(members)
            if gone or anew:
                number, version = self._log.number + 1, self.gate.version
                entry = Entry(number, version, forget=tuple(sorted(gone)), anew=anew)
                self._mirror([entry])
                self._add(entry)
                self._asking = {m: seq for m, seq in self._asking.items() if m not in gone}
                for member in self._pending.keys() - set(members):
                    del self._pending[member]
        self._shard.order.work()

    def push(self, member: int, seq: int, head: PushHead) -> None:
        with self._changed:
            self._push_of(member, seq).head = head
        self.staged(0, member, seq)

    def staged(self, shard: int, member: int, seq: int) -> None:
        """A push is whole at a shard."""
        self._do(lambda: self._stage(shard, member, seq), here=shard == 0)

    def pull(self, member: int, seq: int, *, begin: bool) -> None:
        self._do(lambda: self._pull(member, seq, begin))

    def rest(self, member: int) -> None:
        self._do(lambda: self.gate.rest(time.monotonic(), member), known=True)

    def observe(self, schedule: Mapping[str, Any]) -> None:
        with self._changed:
            self.gate.observe(schedule)
            self._mirror([])

    def leave_out(self, member: int, lease: Lease) -> None:
        with self._changed:
            self.gate.leave_out(member, lease)
            self._mirror([])

    def records(self, recorded: int) -> list[Record]:
        with self._changed:
            self.gate.recorded(recorded)
            return self.gate.records(recorded)

    def figures(self) -> dict[str, dict[str, float]]:
        """By member."""
        with self._changed:
            return self.gate.figures()

    def load(self, state: Mapping[str, Any], incarnation: int) -> None:
        with self._changed:
            self.gate.load_state_dict(state)
            self._pending.clear()
            self._squares.clear()
            self._scales.clear()
            self._log.begin(incarnation)

    def snapshot(self) -> dict[str, Any]:
        """All that a twin has to know, while nothing is carried out."""
        with self._changed:
            entries = [entry.to_json() for entry in self._shard.order.pending]
            return {"gate": self.gate.state_dict(), "entries": entries}

    def take_over(
        self,
        state: Mapping[str, Any],
        past: Sequence[Entry],
        scales: Mapping[int, float],
        entries: Sequence[Entry],
    ) -> None:
        """Go on where the gate of another process ended: `past` was carried out there."""
        with self._changed:
            self.gate.load_state_dict(state)
            self._log.begin(self._shard.incarnation, self._shard.number, past)
            self._scales |= scales
            self._measures = any(entry.measured for entry in entries)
            for entry in entries:  # whom to answer is found out when they ask again
                self._add(entry._replace(gives=()))

    def quiet(self) -> threading.Condition:
        """A context in which nothing is decided."""
        return self._changed

    def state(self) -> dict[str, Any]:
        with self._changed:
            state = self.gate.state_dict()
        del state["pending"]  # of a gate that is taken over, not of a cut
        return state

    @property
    def gate(self) -> Gate:
        if self._gate is None:
            raise PeerError("asks a gate that is not set up")
        return self._gate

    # Other shards.

    def greet(
        self, shard: int, connection: Connection, number: int, incarnation: int, staged: Any
    ) -> None:
        with self._changed:
            self._log.greet(shard, connection, number, incarnation)
        for member, seq in staged:
            self.staged(shard, member, seq)

    def lost(self, shard: int, connection: Connection) -> None:
        with self._changed:
            self._log.forget(shard, connection)
            self._changed.notify_all()

    def squares(self, shard: int, number: int, square: float) -> float | None:
        """What a shard has measured; the scale, if that is known already."""
        with self._changed:
            if number > self._shard.number:
                self._squares.setdefault(number, {})[shard] = square
                self._changed.notify_all()
            return self._scales.get(number)

    def _measure(self, entry: Entry, square: float) -> float:
        """In whichever thread carries the entry out at shard 0."""
        self.squares(0, entry.number, square)
        with self._changed:
            others, held = self._shard.count - 1, self._squares[entry.number]
            self._changed.wait_for(
                lambda: len(held) > others or self._log.peers < others, self._settings.deadline
            )
            if len(held) <= others:  # those that are there are said once only
                raise Abandoned(f"entry {entry.number} lacks the squares of other shards")
            del self._squares[entry.number]
            scale = entry.scale_of(sum(held.values()))
            self._scales[entry.number] = scale
            self._scales.pop(entry.number - _KEPT, None)
            self._log.tell(entry.number, scale)
            return scale

    def _hang_up(self) -> None:
        """Other shards may be waiting for what will not come any more."""
        with self._changed:
            self._squares.clear()
            self._log.hang_up()

    # Decisions.

    def work(self, halted: Callable[[], bool]) -> None:
        """For a thread of its own: what those cannot do who listen to other shards, as they would
        have to wait for themselves."""
        while not halted():
            self._waking.wait(_LOOK)
            self._waking.clear()
            self._shard.order.work()

    def _do(
        self, what: Callable[[], Sequence[Decision]], *, here: bool = True, known: bool = False
    ) -> None:
        """`known`: a gate that takes over has to know of it, whatever comes of it."""
        with self._changed:
            decisions = what()
            entries, told = translate(decisions, self._asking, self._log.number)
            self._measures = self._measures or any(entry.measured for entry in entries)
            if entries or known:
                self._mirror(entries)
            for entry in entries:
                self._add(entry)
            for give in told:
                self._shard.tell(give)
        if here or not self._measures:
            self._shard.order.work()
        else:
            self._waking.set()

    def _mirror(self, entries: Sequence[Entry]) -> None:
        """The twin knows of a decision before anybody else does, who may outlive this gate.

        A shard that is alone tells nobody before its twin has what it carries out.
        """
        if self.mirror is not None and self.mirror.attached:
            wait = self._shard.count > 1 or not entries
            self.mirror.decided(entries, self.gate.state_dict(), wait=wait)

    def _add(self, entry: Entry) -> None:
        self._shard.add(entry)
        self._log.add(entry)

    def _push_of(self, member: int, seq: int) -> _Push:
        held = self._pending.get(member)
        if held is None or held.seq < seq:
            held = self._pending[member] = _Push(seq)
        return held

    def _stage(self, shard: int, member: int, seq: int) -> Sequence[Decision]:
        held = self._push_of(member, seq)
        if held.seq > seq:
            return []
        held.shards.add(shard)
        # One that is sent again may be applied already, where it was staged before.
        whole = len(held.shards) == self._shard.count or self.gate.knows(member, seq)
        if held.head is None or not whole:
            return []
        del self._pending[member]
        self._asking[member] = seq
        return self.gate.push(
            time.monotonic(), member, Push(seq, held.head, frozenset(held.head.missing))
        )

    def _take_back(self, member: int) -> None:
        """It may push the same again, but only here: what other shards have said still holds."""
        if (held := self._pending.get(member)) is not None:
            held.head = None

    def _pull(self, member: int, seq: int, begin: bool) -> Sequence[Decision]:
        self._asking[member] = seq
        return self.gate.pull(time.monotonic(), member, begin=begin)

    def _leave(self, member: int, conversation: object) -> Sequence[Decision]:
        if self._present.get(member) is not conversation:
            return []
        del self._present[member]
        self._take_back(member)
        return self.gate.left(time.monotonic(), member) if self._gate is not None else []


# --- log ---
# Entries in their order, numbered, and how far each other shard has heard of them.

_LOG_KEPT = 4096
"""Entries for a shard that comes back; those that nobody was answered to are few."""


class Log:
    """Not locked: the desk is."""

    def __init__(self) -> None:
        self.incarnation = 0
        self._entries: deque[Entry] = deque(maxlen=_LOG_KEPT)
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
