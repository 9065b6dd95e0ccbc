"""A member's side of the coordinator: what the rest of a worker calls.

    training thread ── report, lease, arrive, leave ──▶ Liaison ──▶ Backlog ──▶ Conversation
        ▲                                                                       (thread) ◀─▶ TCP
        └── waits for a change of ── Standing ◀──────── messages ────────────────────┘

`Liaison` is the interface. `Standing` is what this member knows from the coordinator's messages:
its id, its generation, the last journaled version. The connection below is in `session.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

from echelon.cluster.coordinator.protocol import NAME, VERSION, BadFrame, Message, one_line
from echelon.cluster.coordinator.session import Backlog, Call, Conversation, Item, RunOver
from echelon.core.errors import PeerError
from echelon.core.types import Lease

_LEAVE = 10.0
"""Seconds for the coordinator to acknowledge a leave."""
_LOOK = 0.25
"""Seconds between two checks of a wait's deadline."""


class Liaison:
    """A client of the coordinator, for one member.

    It sends heartbeats, takes orders, and keeps reports until they are journaled. Its thread calls
    `regroup(why, urgent)` when the member has to leave its generation, `notice(text)` with a
    message for people, and `ended(why)` once, when the run is over or the coordinator could not be
    reached for `deadline` seconds. A broken connection is replaced meanwhile, and training
    continues. Create it in the member's own process, not before a fork.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        about: About,
        *,
        regroup: Callable[[str, bool], None],
        notice: Callable[[str], None],
        ended: Callable[[str], None],
        deadline: float,
    ) -> None:
        self._deadline = deadline
        self._backlog = Backlog()
        self._standing = Standing(about, self._backlog, regroup, notice, ended)
        self._talk = Conversation(address, key, deadline, self._backlog, self._standing)
        self._standing.stop = self._talk.stop
        self._talk.start()

    @property
    def member(self) -> int:
        """This member's id. It changes if the member is expelled, and is -1 until it is let in."""
        member = self._standing.member
        return -1 if member is None else member

    @property
    def run(self) -> Mapping[str, Any]:
        """The run's settings as its starter gave them to the coordinator."""
        return self._standing.run

    @property
    def leads(self) -> bool:
        return self._standing.leads

    @property
    def is_heard(self) -> bool:
        """Whether reports may still reach the journal."""
        return self._standing.end is None

    @property
    def recorded(self) -> int | None:
        """The last version known to be journaled; None for a member that does not lead."""
        return self._standing.recorded if self._standing.leads else None

    def arrive(
        self, generation: int, progress: Sequence[int], why: str, suspect: int | None = None
    ) -> Generation:
        """Leave `generation` (0: a newcomer) and wait for the next one with this member in it.

        `suspect` is the id of a member to blame. A member that was expelled arrives as a newcomer.
        """
        standing = self._standing
        with standing.turn:
            standing.formed = None
            standing.arrival = {
                "generation": generation if standing.generation else 0,
                "progress": [int(made) for made in progress],
                "why": one_line(why),
                "suspect": suspect,
            }
            self._talk.wake()
            standing.wait_for(lambda: standing.formed is not None, self._deadline)
            assert standing.formed is not None
            return standing.formed

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """Report updates in order, each as (epoch, start, stop, first, last).

        Every member reports. The leader's reports are sent at once; those of the others when they
        leave their generation, in case the leader is lost.
        """
        standing = self._standing
        if standing.generation and records:
            self._backlog.report(standing.generation, records)
            if standing.leads:
                self._talk.wake()

    def rolled_back(self, version: int, why: str) -> None:
        """Record that all continue from `version`. Every member calls it; the leader's is sent."""
        self._standing.recorded = version
        if self._standing.leads:
            self._post("rolled_back", version=version, why=one_line(why))
        else:
            self._backlog.forget_records()

    def shares(self, version: int, shares: Sequence[float]) -> None:
        """Record how batches are divided from this version on. Only the leader's call counts."""
        if self._standing.leads:
            generation, values = self._standing.generation, [float(share) for share in shares]
            self._post("shares", generation=generation, version=version, shares=values)

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None:
        """Publish what is consumed; all leases are void when this returns. Only the leader's call
        counts."""
        if not self._standing.leads:
            return
        standing, item = self._standing, self._post("ledger", version=version, ledger=dict(ledger))
        with standing.turn:
            standing.wait_for(lambda: not self._backlog.holds(item), self._deadline)

    def lease(
        self, epoch: int, wanted: int, unit: int = 1, used: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Lease], int]:
        """Lease until this member holds about `wanted` samples of an epoch, more if it is fast.

        Return all ranges it holds now, and how many samples of the epoch are not done. While there
        are any, leases of lost members may become free again. `used` are ranges that this member
        held and has finished; the new ranges add up to a multiple of `unit`.
        """
        standing = self._standing
        done = [list(pair) for pair in used]
        item = self._post("lease", epoch=epoch, wanted=wanted, unit=unit, used=done)
        with standing.turn:
            standing.wait_for(lambda: self._answered(item), self._deadline)
            answer = standing.answers.pop(item.seq or 0, None)
        if answer is None:
            return [], 1  # expelled meanwhile: this member holds nothing, and the epoch goes on
        return [Lease(epoch, start, stop) for start, stop in answer["ranges"]], answer["left"]

    def _answered(self, item: Item) -> bool:
        return item.seq in self._standing.answers or not self._backlog.holds(item)

    def leave(self, why: str, fatal: bool = False, over: bool = False) -> None:
        """Leave the run, once all reports are journaled. The others continue, unless:

        `fatal`: the run ends for all, with `why` as the reason. `over`: training is over for all,
        with `why` as the status, and members that leave from now on are not missed.
        """
        standing = self._standing
        with standing.turn:
            # After the run has ended, an error is probably a consequence of that.
            fatal = fatal and standing.ending is None
            if standing.end is None and standing.last is None:
                item = Item("leave", {"why": one_line(why), "fatal": fatal, "over": over})
                standing.last = self._backlog.put(item)
                self._talk.wake()
                until = time.monotonic() + min(_LEAVE, self._deadline)
                while (
                    self._backlog.holds(item) and standing.end is None and time.monotonic() < until
                ):
                    standing.turn.wait(0.05)
        self._talk.stop()

    def close(self) -> None:
        """End the thread and the connection. Without a `leave` before, this member is lost."""
        with self._standing.turn:
            self._standing.end = self._standing.end or "this member has closed its liaison"
            self._standing.turn.notify_all()
        self._talk.close()

    def pulse(self, step: int, doing: str) -> None:
        """Set the step and the activity that the next heartbeat carries."""
        standing = self._standing
        standing.step = step
        standing.doing = doing

    @property
    def pace(self) -> float | None:
        """Seconds per sample, sent with every heartbeat."""
        return self._standing.pace

    @pace.setter
    def pace(self, seconds: float | None) -> None:
        self._standing.pace = seconds

    def _post(self, kind: str, **fields: Any) -> Item:
        item = self._backlog.put(Item(kind, fields))
        self._talk.wake()
        return item


@dataclass(frozen=True, slots=True)
class About:
    """What a member says about itself in its hello."""

    number: int | None
    """Its place among the members started together; None for a member that joins."""
    name: str
    host: str
    """Equal for two processes if and only if each can see the other's pid."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A fixed set of members, and this member's place (`index`) among them."""

    number: int
    index: int
    members: tuple[Fellow, ...]
    store: tuple[str, int]
    """Host and port of the store where its members exchange their addresses."""
    name: str
    """Prefix of this generation's keys in that store; unique."""
    source: int | None
    """Index of the member that brings those behind up to date; None if no member is behind."""
    behind: tuple[int, ...]
    recorded: int
    """The last journaled version."""
    anew: bool = False
    """Whether no member has the run's state, so that the source has to read a checkpoint."""


@dataclass(frozen=True, slots=True)
class Fellow:
    """A member of a generation, possibly this one."""

    id: int
    host: str
    pid: int
    name: str

    def __str__(self) -> str:
        return f"member {self.id} (pid {self.pid} on {self.host.partition('/')[0]})"


class Standing:
    """What a member knows about itself and the run from the coordinator's messages.

    The client's thread updates it (`heard`); other threads wait for a change (`wait_for`).
    """

    def __init__(
        self,
        about: About,
        backlog: Backlog,
        regroup: Callable[[str, bool], None],
        notice: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self.member: int | None = None
        self.run: Mapping[str, Any] = {}
        self.generation = 0
        self.recorded = 0
        """The last journaled version that this member knows of."""
        self.index: int | None = None
        self.arrival: dict[str, Any] | None = None
        """The `arrived` message to send while this member waits for a generation."""
        self.formed: Generation | None = None
        self.last: Item | None = None
        """The leave that is under way."""
        self.end: str | None = None
        """Why the coordinator cannot be reached any more."""
        self.ending: str | None = None
        """Why the run is over. The coordinator may still accept reports, unless `end` is set."""
        self.turn = Condition()
        self.step: int | None = None
        self.doing = ""
        self.pace: float | None = None
        self.answers: dict[int, Message] = {}
        """Answers to lease requests, by sequence number."""
        self.stop: Callable[[], None] = lambda: None
        self._number = about.number
        self._about, self._backlog = about, backlog
        self._regroup, self._notice, self._ended = regroup, notice, ended
        self._word = time.monotonic()
        self._waiting = ""
        self._handlers: dict[str, Callable[[Message], None]] = {
            "regroup": self._ordered,
            "generation": self._is_formed,
            "waiting": self._waits,
            "notice": lambda message: notice(message["text"]),
            "ack": self._acknowledged,
            "leased": self._leased,
            "refused": self._refused,
            "expelled": lambda message: self._expelled(message["why"]),
            "end": self._is_over,
        }

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def tells_records(self) -> bool:
        return self.leads or self.last is not None

    def wait_for(self, what: Callable[[], bool], deadline: float) -> None:
        """Wait until `what` is true; hold `turn`. Raise `PeerError` when the run has ended, or when
        no message has come for `deadline` seconds."""
        self._word = time.monotonic()
        while not what():
            if (why := self.ending or self.end) is not None:
                raise PeerError(f"the run has ended: {why}")
            if time.monotonic() - self._word > deadline:
                raise PeerError(f"no word from the coordinator for {deadline:g} s")
            self.turn.wait(_LOOK)

    def beat(self) -> dict[str, Any]:
        cpu = round(time.process_time(), 3)
        doing = one_line(self.doing, NAME)
        return {"step": self.step, "doing": doing, "pace": self.pace, "cpu": cpu}

    def introduce(self, call: Call) -> None:
        """Say hello under this member's id, or as a newcomer if it was expelled."""
        call.send(
            "hello",
            role="trainer",
            version=VERSION,
            pid=os.getpid(),
            host=self._about.host,
            name=one_line(self._about.name, NAME),
            number=self._number,
            member=self.member,
            generation=self.generation,
        )
        answer = call.next("welcome", "expelled", "end")
        if answer["kind"] == "end":
            raise RunOver(answer["why"])
        if answer["kind"] == "expelled":
            self._expelled(answer["why"])
            raise ConnectionResetError("expelled")  # the next connection is made as a newcomer
        self.member, self.run = answer["member"], answer["run"]

    def heard(self, message: Message) -> None:
        self._word = time.monotonic()
        handler = self._handlers.get(message["kind"])
        if handler is not None:  # else a frame of a later version of the protocol: ignore it
            handler(message)

    def _ordered(self, message: Message) -> None:
        if message["generation"] > self.generation and self.arrival is None:
            self._regroup(message["why"], message["urgent"])

    def _is_formed(self, message: Message) -> None:
        formed = read_generation(message)
        if formed.number <= self.generation:
            return  # repeated by the coordinator, in case it was lost
        self._backlog.on_record(formed.recorded)
        with self.turn:
            self.generation, self.index = formed.number, formed.index
            self.recorded = formed.recorded
            self.formed, self.arrival, self._waiting = formed, None, ""
            self.turn.notify_all()

    def _waits(self, message: Message) -> None:
        """Show why no generation is formed yet, once; the coordinator repeats it every second."""
        if message["tell"] and message["why"] != self._waiting:
            self._waiting = message["why"]
            self._notice(self._waiting)

    def _acknowledged(self, message: Message) -> None:
        self.recorded = message["version"]
        if message["seq"] is not None:
            self._backlog.acknowledged(message["seq"])
        elif not self.leads:
            self._backlog.on_record(message["version"])
        if self.last is not None and not self._backlog.holds(self.last):
            self.stop()
        with self.turn:
            self.turn.notify_all()

    def _leased(self, message: Message) -> None:
        self._backlog.acknowledged(message["seq"])
        with self.turn:
            self.answers[message["seq"]] = message
            self.turn.notify_all()

    def _refused(self, message: Message) -> None:
        """Handle the refusal of one request (with `seq`), or of this member for good."""
        if message.get("seq") is None:
            self.over(f"the coordinator refused us: {message['why']}")
        else:
            self._notice(message["why"])

    def _expelled(self, why: str) -> None:
        if self.last is not None:  # the leave was handled, only its acknowledgment was lost
            self._backlog.clear()
            with self.turn:
                self.turn.notify_all()
            self.stop()
            return
        self._backlog.expelled()
        with self.turn:
            self.member = self._number = None
            self.generation, self.index = 0, None
            if self.arrival is not None:
                self.arrival = {**self.arrival, "generation": 0, "suspect": None}
            awaited = self.arrival is not None
            self.turn.notify_all()
        if not awaited:
            self._regroup(f"expelled: {why}", True)

    def _is_over(self, message: Message) -> None:
        """Handle the end of the run.


        `hears`: it accepts reports until this member leaves. `recorded`: this member would have led
        the next generation, and this is the last journaled version.
        """
        if message.get("recorded") is not None:
            self.index, self.recorded = 0, message["recorded"]
        if message.get("hears"):
            self._ends(message["why"])
        else:
            self.over(message["why"])

    def over(self, why: str) -> None:
        """End: the run is over, or the coordinator cannot be reached."""
        with self.turn:
            self.end = why
            self.turn.notify_all()
        self.stop()
        self._ends(why)

    def _ends(self, why: str) -> None:
        with self.turn:
            first, self.ending = self.ending is None, self.ending or why
            self.turn.notify_all()
        if first and self.last is None:
            self._ended(why)


def read_generation(message: Message) -> Generation:
    try:
        host, port = message["store"]
        return Generation(
            number=message["number"],
            index=message["index"],
            members=tuple(Fellow(**member) for member in message["members"]),
            store=(host, port),
            name=message["name"],
            source=message["source"],
            behind=tuple(message["behind"]),
            anew=message["anew"],
            recorded=message["recorded"],
        )
    except (KeyError, TypeError, ValueError):
        raise BadFrame("a frame 'generation' lacks something") from None
