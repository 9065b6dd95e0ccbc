"""What a member knows of its place in the run, from what the coordinator says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from threading import Condition
from typing import Any

from echelon.cluster.coordinator.backlog import Backlog, Item
from echelon.cluster.coordinator.call import Call, RunOver
from echelon.cluster.coordinator.frames import Message
from echelon.cluster.coordinator.generation import About, Generation, read_generation
from echelon.cluster.coordinator.handshake import VERSION
from echelon.cluster.coordinator.messages import NAME, one_line
from echelon.core.errors import PeerError

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
