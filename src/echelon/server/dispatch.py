"""Dispatch, at shard 0: reports events to the gate, and its decisions to all shards.

PUSH, and STAGED of all other shards ─▶ gate.push ─▶ decisions ─▶ entries ─▶ log ─▶ shards
                                                                     └─▶ shard 0's own order

The gate's twin gets entries before any other process does, so that a gate that takes over knows all
that was ever announced.
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
from echelon.server.replication import Mirror
from echelon.server.shard import Abandoned, ServerSettings, Shard

_LOOK = 0.5
"""Seconds after which `work` looks at the entries even if no event wakes it."""
_SCALES_KEPT = 256
"""Scales of measured entries kept for shards that missed them."""


class Desk:
    """Calls the gate under one lock, and passes its decisions on as entries.

    Shard 0 carries its own entries out after the lock is released, because applying is slow.
    """

    def __init__(self, shard: Shard, settings: ServerSettings) -> None:
        self._shard, self._settings = shard, settings
        self._changed = threading.Condition(threading.RLock())
        self._gate: Gate | None = None
        self._log = Log()
        self._pending: dict[int, _Push] = {}
        """Per member, its push that not every shard has staged yet."""
        self._present: dict[int, object] = {}
        """Per member, its latest session: the end of an older one does not mean that it left."""
        self._asking: dict[int, int] = {}
        """The number of each member's last push or pull, which its next answer is for."""
        self._squares: dict[int, dict[int, float]] = {}
        """Per measured entry and shard, the squared norm of its part of the sum."""
        self._scales: dict[int, float] = {}
        """Per measured entry, the scale that follows from the squares."""
        self._measures = False
        """Whether there was a measured entry: it must not be carried out by a thread that hears
        another shard, because that thread has to receive the squares."""
        self.mirror: Mirror | None = None
        self._waking = threading.Event()
        shard.measure, shard.gave_up = self._measure, self._hang_up

    @property
    def gate(self) -> Gate:
        if self._gate is None:
            raise PeerError("asks a gate that is not set up")
        return self._gate

    # Events of trainers

    def prepare(self, rules: Mapping[str, Any], parameters: int) -> None:
        """Build the gate, when the shard is set up."""
        with self._changed:
            self._gate = Gate(rules, parameters)

    def arrived(self, member: int, conversation: object) -> None:
        """Note a member's new session, in which it repeats what it asked for before."""
        with self._changed:
            self._present[member] = conversation
            self._take_back(member)
            if self._gate is not None:
                self._gate.back(member)

    def left(self, member: int, conversation: object) -> None:
        self._do(lambda: self._leave(member, conversation))

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """Open a generation. An entry has all shards forget what lost members staged."""
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
        """Note a push that is staged on shard 0, with the head of its PUSH frame."""
        with self._changed:
            self._push_of(member, seq).head = head
        self.staged(0, member, seq)

    def staged(self, shard: int, member: int, seq: int) -> None:
        """Note that a push is staged on a shard. Once all shards have it, it goes to the gate."""
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
        """Return what was applied after version `recorded`, and drop older records."""
        with self._changed:
            self.gate.recorded(recorded)
            return self.gate.records(recorded)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the gate's counts by member."""
        with self._changed:
            return self.gate.figures()

    # Events of other shards

    def greet(
        self, shard: int, connection: Connection, number: int, incarnation: int, staged: Any
    ) -> None:
        """Handle a shard's HELLO: send the entries after its last `number`, and note what it has
        staged."""
        with self._changed:
            self._log.greet(shard, connection, number, incarnation)
        for member, seq in staged:
            self.staged(shard, member, seq)

    def lost(self, shard: int, connection: Connection) -> None:
        with self._changed:
            self._log.forget(shard, connection)
            self._changed.notify_all()

    def squares(self, shard: int, number: int, square: float) -> float | None:
        """Note a shard's part of a measured entry. Returns the scale if it is known already."""
        with self._changed:
            if number > self._shard.number:
                self._squares.setdefault(number, {})[shard] = square
                self._changed.notify_all()
            return self._scales.get(number)

    # Checkpoints and the twin

    def state(self) -> dict[str, Any]:
        """Return the gate's part of a checkpoint."""
        with self._changed:
            state = self.gate.state_dict()
        del state["pending"]  # only for a gate that takes over
        return state

    def load(self, state: Mapping[str, Any], incarnation: int) -> None:
        """Load an upload's state, and begin a log of its own for it."""
        with self._changed:
            self.gate.load_state_dict(state)
            self._pending.clear()
            self._squares.clear()
            self._scales.clear()
            self._log.begin(incarnation)

    def snapshot(self) -> dict[str, Any]:
        """Return the gate's state and the entries not carried out yet, for a new twin.

        The caller keeps shard 0's order still.
        """
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
        """Go on where the gate of another process ended.

        `past`: entries that were carried out; `entries`: those decided but not carried out;
        `scales`: of measured entries in the past.
        """
        with self._changed:
            self.gate.load_state_dict(state)
            self._log.begin(self._shard.incarnation, self._shard.number, past)
            self._scales |= scales
            self._measures = any(entry.measured for entry in entries)
            for entry in entries:  # members repeat their questions, and are answered then
                self._add(entry._replace(gives=()))

    def quiet(self) -> threading.Condition:
        """Return a context in which the gate decides nothing."""
        return self._changed

    # Decisions

    def _do(
        self, what: Callable[[], Sequence[Decision]], *, here: bool = True, known: bool = False
    ) -> None:
        """Call the gate by `what`, then pass on and carry out its decisions.

        `here`: this thread may carry out measured entries. `known`: the twin gets the gate's new
        state even if nothing was decided.
        """
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
        """Send decisions to the twin before other processes hear of them and outlive this gate.

        A single shard need not wait for the twin here: it waits before it answers members.
        """
        if self.mirror is not None and self.mirror.attached:
            wait = self._shard.count > 1 or not entries
            self.mirror.decided(entries, self.gate.state_dict(), wait=wait)

    def _add(self, entry: Entry) -> None:
        self._shard.add(entry)
        self._log.add(entry)

    def work(self, halted: Callable[[], bool]) -> None:
        """Carry out entries in a thread of its own, until the process ends.

        A thread that hears another shard leaves measured entries to this one.
        """
        while not halted():
            self._waking.wait(_LOOK)
            self._waking.clear()
            self._shard.order.work()

    def _stage(self, shard: int, member: int, seq: int) -> Sequence[Decision]:
        held = self._push_of(member, seq)
        if held.seq > seq:
            return []
        held.shards.add(shard)
        # A repeated push that was applied already is not staged again on every shard.
        whole = len(held.shards) == self._shard.count or self.gate.knows(member, seq)
        if held.head is None or not whole:
            return []
        del self._pending[member]
        self._asking[member] = seq
        return self.gate.push(
            time.monotonic(), member, Push(seq, held.head, frozenset(held.head.missing))
        )

    def _push_of(self, member: int, seq: int) -> _Push:
        """Return the member's pending push; a new one if `seq` is later."""
        held = self._pending.get(member)
        if held is None or held.seq < seq:
            held = self._pending[member] = _Push(seq)
        return held

    def _take_back(self, member: int) -> None:
        """Have a pending push wait for its head again: the member may repeat it. The shards that
        have staged it keep its gradients."""
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

    def _measure(self, entry: Entry, square: float) -> float:
        """Return the scale of a measured entry, once all shards have reported their squares.

        Called by the thread that carries the entry out at shard 0. Raises `Abandoned` if a shard is
        lost meanwhile, or the deadline passes.
        """
        self.squares(0, entry.number, square)
        with self._changed:
            others, held = self._shard.count - 1, self._squares[entry.number]
            self._changed.wait_for(
                lambda: len(held) > others or self._log.peers < others, self._settings.deadline
            )
            if len(held) <= others:  # keep those that are here: a shard reports each square once
                raise Abandoned(f"entry {entry.number} lacks the squares of other shards")
            del self._squares[entry.number]
            scale = entry.scale_of(sum(held.values()))
            self._scales[entry.number] = scale
            self._scales.pop(entry.number - _SCALES_KEPT, None)
            self._log.tell(entry.number, scale)
            return scale

    def _hang_up(self) -> None:
        """Disconnect other shards, which may be waiting for an update that will not be made."""
        with self._changed:
            self._squares.clear()
            self._log.hang_up()


@dataclass(slots=True)
class _Push:
    """A push that not every shard has staged yet."""

    seq: int
    head: PushHead | None = None
    """The PUSH frame's head; None until shard 0 has it."""
    shards: set[int] = field(default_factory=set)
    """Shards that have staged it."""


# The log

_ENTRIES_KEPT = 4096
"""Entries kept for a shard that reconnects. It lacks only the last few of them."""


class Log:
    """Numbered entries in their order, and the shards that get them.

    Not thread-safe: `Desk` holds its lock.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self._entries: deque[Entry] = deque(maxlen=_ENTRIES_KEPT)
        self._peers: dict[int, Connection] = {}
        self.number = 0

    @property
    def peers(self) -> int:
        """How many other shards are connected."""
        return len(self._peers)

    def begin(self, incarnation: int, number: int = 0, past: Sequence[Entry] = ()) -> None:
        """Begin the log of an upload: all earlier entries but `past` are void.

        Shards have to say HELLO again.
        """
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
        """Send a shard the entries after its last `number`, and from now on every new one.

        A shard of another incarnation, or one that is too far behind, gets nothing.
        """
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
        """Send all shards the scale of a measured entry."""
        for connection in self._peers.values():
            _try(connection, Kind.FACTOR, {"number": number, "scale": scale})

    def forget(self, shard: int, connection: Connection) -> None:
        if self._peers.get(shard) is connection:
            del self._peers[shard]

    def hang_up(self) -> None:
        """Close all shards' connections."""
        for connection in self._peers.values():
            connection.close()
        self._peers.clear()

    def _send(self, shard: int, connection: Connection, entry: Entry) -> None:
        fields = entry.to_json() | {"incarnation": self.incarnation}
        if not _try(connection, Kind.ENTRY, fields):
            self.forget(shard, connection)


def _try(connection: Connection, kind: Kind, head: dict[str, object]) -> bool:
    """Send a frame, and return whether the connection took it.

    The thread that hears a lost shard handles the loss.
    """
    try:
        connection.send(kind, head)
    except PeerError:
        return False
    return True
