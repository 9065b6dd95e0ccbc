"""CoordinatorClient."""

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

# --- liaison ---
# A member's side of its conversation with the coordinator.

_LEAVE = 10.0
"""Seconds to be heard in when leaving."""


class Liaison:
    """Gives signs of life, brings orders, and keeps what was reported until it is on record.

    Its thread calls back: `regroup(why, urgent)` when the generation is to be left, `notice(text)`
    with something for people to read, `ended(why)` once, when the run is over or the coordinator
    could not be reached for `deadline` seconds. A connection that breaks is made anew meanwhile,
    and training goes on undisturbed. To be made in the process that it speaks for.
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
        """This member's id; another one after it was expelled, -1 while it is between the two."""
        member = self._standing.member
        return -1 if member is None else member

    @property
    def run(self) -> Mapping[str, Any]:
        """What whoever started the run wants its members to know."""
        return self._standing.run

    @property
    def pace(self) -> float | None:
        """Seconds per sample, as told with every beat."""
        return self._standing.pace

    @pace.setter
    def pace(self, seconds: float | None) -> None:
        self._standing.pace = seconds

    def pulse(self, step: int, doing: str) -> None:
        """Where this member is; told with the next beat."""
        standing = self._standing
        standing.step = step
        standing.doing = doing

    def arrive(
        self, generation: int, progress: Sequence[int], why: str, suspect: int | None = None
    ) -> Generation:
        """Leave `generation` (0: a newcomer) and wait for the next one with this member in it.

        A member that was expelled arrives as a newcomer, whatever it says.
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
        """Updates that were made: (epoch, start, stop, first, last) each, in order.

        Every member reports. The leader's are sent; the others' when they leave their generation,
        in case the leader is lost.
        """
        standing = self._standing
        if standing.generation and records:
            self._backlog.report(standing.generation, records)
            if standing.leads:
                self._talk.wake()

    @property
    def is_heard(self) -> bool:
        """Whether what is reported may still come to be on record."""
        return self._standing.end is None

    @property
    def leads(self) -> bool:
        return self._standing.leads

    @property
    def recorded(self) -> int | None:
        """The last version known to be on record; None for one that does not lead."""
        return self._standing.recorded if self._standing.leads else None

    def shares(self, version: int, shares: Sequence[float]) -> None:
        """From this version on batches are split like that; only the leader's word counts."""
        if self._standing.leads:
            generation, values = self._standing.generation, [float(share) for share in shares]
            self._post("shares", generation=generation, version=version, shares=values)

    def rolled_back(self, version: int, why: str) -> None:
        """All go on from this version: every member says so, the leader's word is sent."""
        self._standing.recorded = version
        if self._standing.leads:
            self._post("rolled_back", version=version, why=one_line(why))
        else:
            self._backlog.forget_records()

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None:
        """Say what is consumed; all leases are void when this returns. Only the leader's word
        counts."""
        if not self._standing.leads:
            return
        standing, item = self._standing, self._post("ledger", version=version, ledger=dict(ledger))
        with standing.turn:
            standing.wait_for(lambda: not self._backlog.holds(item), self._deadline)

    def lease(
        self, epoch: int, wanted: int, unit: int = 1, used: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Lease], int]:
        """Hold about `wanted` samples of an epoch in all, more if this member is fast.

        Returns everything held, what was before too, and how many samples of the epoch are not
        committed: while there are any, others may still give theirs back. `used`: what this member
        held and is done with; what is handed out is a multiple of `unit`.
        """
        standing = self._standing
        done = [list(pair) for pair in used]
        item = self._post("lease", epoch=epoch, wanted=wanted, unit=unit, used=done)
        with standing.turn:
            standing.wait_for(lambda: self._answered(item), self._deadline)
            answer = standing.answers.pop(item.seq or 0, None)
        if answer is None:
            return [], 1  # expelled meanwhile: this member holds nothing
        return [Lease(epoch, start, stop) for start, stop in answer["ranges"]], answer["left"]

    def leave(self, why: str, fatal: bool = False, over: bool = False) -> None:
        """End for good, once all that was reported is on record.

        `fatal`: the run ends for all, with this as its reason. `over`: training is over for all,
        `why` is its status, and whoever leaves is not missed. Otherwise the others go on without.
        """
        standing = self._standing
        with standing.turn:
            fatal = fatal and standing.ending is None  # or it follows from what ended the run
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
        """End the thread and the connection; without a `leave` this member counts as lost."""
        with self._standing.turn:
            self._standing.end = self._standing.end or "this member has closed its liaison"
            self._standing.turn.notify_all()
        self._talk.close()

    def _answered(self, item: Item) -> bool:
        return item.seq in self._standing.answers or not self._backlog.holds(item)

    def _post(self, kind: str, **fields: Any) -> Item:
        item = self._backlog.put(Item(kind, fields))
        self._talk.wake()
        return item


# --- standing ---
# What a member knows of its place in the run, from what the coordinator says.

_LOOK = 0.25


class Standing:
    """Kept up to date by the liaison's thread; others wait for it to change."""

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
        """The last version on record that this member has heard of."""
        self.index: int | None = None
        self.arrival: dict[str, Any] | None = None
        self.formed: Generation | None = None
        self.last: Item | None = None
        """The leave that is under way."""
        self.end: str | None = None
        """Why there is nobody to talk to any more."""
        self.ending: str | None = None
        """Why the run is over; the coordinator may still hear what is to be told."""
        self.turn = Condition()
        self.step: int | None = None
        self.doing = ""
        self.pace: float | None = None
        self.answers: dict[int, Message] = {}
        """To leases, by number."""
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
        """Until it is so. Raises if it cannot be any more, or if nobody says a word for so long."""
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
        """Say hello as the one we are, or anew if we were given up."""
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
            raise ConnectionResetError("expelled")  # the next one is made as a newcomer
        self.member, self.run = answer["member"], answer["run"]

    def heard(self, message: Message) -> None:
        self._word = time.monotonic()
        handler = self._handlers.get(message["kind"])
        if handler is not None:  # or it is of a later version, and nothing that was awaited
            handler(message)

    def over(self, why: str) -> None:
        """The run is, or nobody can be reached who would know."""
        with self.turn:
            self.end = why
            self.turn.notify_all()
        self.stop()
        self._ends(why)

    def _is_over(self, message: Message) -> None:
        """The coordinator says so, whether it will listen until we leave, and to whom would have
        come to lead, how far the record goes."""
        if message.get("recorded") is not None:
            self.index, self.recorded = 0, message["recorded"]
        if message.get("hears"):
            self._ends(message["why"])
        else:
            self.over(message["why"])

    def _ends(self, why: str) -> None:
        with self.turn:
            first, self.ending = self.ending is None, self.ending or why
            self.turn.notify_all()
        if first and self.last is None:
            self._ended(why)

    def _ordered(self, message: Message) -> None:
        if message["generation"] > self.generation and self.arrival is None:
            self._regroup(message["why"], message["urgent"])

    def _is_formed(self, message: Message) -> None:
        formed = read_generation(message)
        if formed.number <= self.generation:
            return  # told again, in case it was not heard
        self._backlog.on_record(formed.recorded)
        with self.turn:
            self.generation, self.index = formed.number, formed.index
            self.recorded = formed.recorded
            self.formed, self.arrival, self._waiting = formed, None, ""
            self.turn.notify_all()

    def _waits(self, message: Message) -> None:
        """It is said every second, so that we know it is still so."""
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
        """One request of ours, or all of us: then there is no use in trying again."""
        if message.get("seq") is None:
            self.over(f"the coordinator refused us: {message['why']}")
        else:
            self._notice(message["why"])

    def _expelled(self, why: str) -> None:
        if self.last is not None:  # it was heard before its acknowledgement was lost
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


# --- generation ---
# What members and coordinator tell each other of themselves, on the member's side.


@dataclass(frozen=True, slots=True)
class About:
    """A member as it introduces itself."""

    number: int | None
    """Its place among those started together; None for one that joins."""
    name: str
    host: str
    """The same for two processes if and only if one finds the other's pid."""


@dataclass(frozen=True, slots=True)
class Fellow:
    """Another member, or oneself."""

    id: int
    host: str
    pid: int
    name: str

    def __str__(self) -> str:
        return f"member {self.id} (pid {self.pid} on {self.host.partition('/')[0]})"


@dataclass(frozen=True, slots=True)
class Generation:
    """A fixed set of members, and one's own place among them."""

    number: int
    index: int
    members: tuple[Fellow, ...]
    store: tuple[str, int]
    """Host and port of where its members meet."""
    name: str
    """Under which they meet there: no other generation has it."""
    source: int | None
    """The index of the one who heals those behind; None if nobody has to be healed."""
    behind: tuple[int, ...]
    recorded: int
    """The last version on record."""
    anew: bool = False
    """Whether nobody has the run's state, and the source has to read a checkpoint."""


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
