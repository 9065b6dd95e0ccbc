"""Generations: fixed sets of members; a new one is formed whenever a member joins, leaves or dies.

       all expected members have arrived              a member is lost, or another one arrives
GATHERING ───────────────────────────▶ FORMED ───────────────────────────────▶ GATHERING …
    │ too few for too long                │ a member says that training is over, or has failed
    ▼                                     ▼
  ENDED ◀──────────────────────────── CLOSING      when the last member has left

`Generations` is the state machine. `Formation` describes one generation: its members in order, and
which of them is the source that brings others up to date.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from echelon.cluster.coordinator.effects import BARREN, START, Outbox, Settings
from echelon.cluster.coordinator.membership import Arrival, Lateness, Member, Roster
from echelon.cluster.coordinator.protocol import BadFrame, Message, common_part, encode_with
from echelon.cluster.coordinator.versions import Versions

_REPEAT = 1.0
"""Seconds between two messages to a waiting member; they also show that the coordinator lives."""
_NAMED = 3
"""Members that such a message names; the rest are counted."""


class Phase(Enum):
    GATHERING = "gathering"
    FORMED = "formed"
    CLOSING = "closing"
    ENDED = "ended"


class Generations:
    """The state machine. It has no clock: callers pass the time."""

    def __init__(
        self,
        settings: Settings,
        store: tuple[str, int],
        roster: Roster,
        versions: Versions,
        outbox: Outbox,
        now: float,
    ) -> None:
        self.phase = Phase.GATHERING
        self.current = Formation()
        self.why = "the run begins"
        self.urgent = False
        self.last_word: tuple[str, str] | None = None
        """Status and reason, once the run is over."""
        self.lateness = Lateness()
        self._settings, self._store = settings, store
        self._roster, self._versions, self._outbox = roster, versions, outbox
        self._began = self._ordered = self._reminded = now
        self._first: float | None = None
        """When the first member of the old generation arrived."""
        self._short: float | None = None
        """Since when there are too few members."""
        self._unseen_gone = 0
        """Processes started together that ended before they said hello."""
        self._arrivals = 0
        self._barren = self._news = 0
        """Generations in a row without an update; `Versions.news` when this one was formed."""

    @property
    def number(self) -> int:
        return self.current.number

    @property
    def is_first(self) -> bool:
        """Whether no generation was formed yet: the first one waits for all started together."""
        return not self.current.members

    @property
    def leader(self) -> int | None:
        return self.current.order[0] if self.current.order else None

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.CLOSING, Phase.ENDED)

    def arrived(self, now: float, member: Member, message: Message) -> None:
        """Note that a member has left its generation, or is new, and is ready for the next one."""
        left = message["generation"]
        if left < member.generation:
            return  # a repeated message: the answer to the first is on its way
        if left > member.generation:
            raise BadFrame(f"{member} leaves generation {left}, and is in {member.generation}")
        if self.is_over:
            self._say_end(member)
            return
        if member.arrival is None:
            self._arrivals += 1
            member.arrival = Arrival(self._arrivals, [])
        member.arrival.progress = message["progress"]
        if left and self._first is None:
            self._first = now
        if self.phase is Phase.FORMED:
            why = message["why"] or "it is here to take part"  # a newcomer gives no reason
            self._gather(now, f"{member}: {why}", urgent=left > 0)
        self.try_to_form(now)

    def awaited(self) -> list[Member]:
        """Return the members that have to arrive before a generation is formed."""
        if self.phase is not Phase.GATHERING:
            return []
        if self.is_first:
            return [m for m in self._roster if m.number is not None and m.arrival is None]
        found = map(self._roster.get, self.current.order)
        return [member for member in found if member is not None and member.arrival is None]

    def try_to_form(self, now: float) -> None:
        if self.phase is not Phase.GATHERING or self.awaited() or self._unseen(now):
            return
        members = chosen(self._roster, self.current)
        if len(members) < max(1, self._settings.min_workers):
            if self._short is None:
                self._short = now
                self._remind(now)
        elif self._news == self._versions.news and self._barren >= BARREN:
            count = f"{self._barren} generations in a row"
            self.end("failed", f"{count} brought no update; the last one ended: {self.why}")
        else:
            self._form(now, members)

    def _unseen(self, now: float) -> int:
        """Return how many of the members started together have not said hello, but still may."""
        if not self.is_first or now - self._began > max(START, self._settings.wait):
            return 0
        expected = self._settings.expected
        seen = sum(map(self._roster.known, range(expected)))
        return max(0, expected - seen - self._unseen_gone)

    def _form(self, now: float, members: Sequence[Member]) -> None:
        self._barren = self._barren + 1 if self._news == self._versions.news else 1
        self._news = self._versions.news
        self.restore(formed(self.number + 1, members, self._versions.recorded, self._store))
        self._outbox.note("generation", **self.current.entry, why=self.why, shares=None)
        self._versions.formed(now, self.number)
        for member in members:
            member.generation, member.arrival, member.moved = self.number, None, now
            self._tell(member)

    def _tell(self, member: Member) -> None:
        self._outbox.mail.append((member.id, self.current.frame(member.id)))

    def returned(self, member: Member, generation: int) -> None:
        """Send a member that connected again what it may have missed, being in `generation`."""
        if self.phase is Phase.ENDED or self._hears_last_words:
            self._say_end(member)
            return
        if generation < member.generation:
            self._tell(member)
        if not self.is_first and member in self.awaited():
            self._order(member)

    def lost(self, now: float, member: Member, why: str) -> None:
        """Note that a member was removed from the roster."""
        if self.phase is Phase.CLOSING and not len(self._roster):
            assert self.last_word is not None
            self.end(*self.last_word)
        if self.is_over:
            return
        if member.id in self.current.order:
            self._versions.wounded(now)
            self._gather(now, f"{member} {why}", urgent=True)
        self.try_to_form(now)

    def never_came(self, now: float) -> None:
        """Note that a process started together with others ended before it said hello."""
        self._unseen_gone += 1
        self.try_to_form(now)

    def _gather(self, now: float, why: str, *, urgent: bool) -> None:
        if self.phase is Phase.FORMED:
            self.phase = Phase.GATHERING
        elif self.urgent or not urgent:
            return
        self.why, self.urgent, self._ordered, self._reminded = why, urgent, now, now
        for member in self.awaited():
            self.lateness.lasts(member, now)
            self._order(member)

    def _order(self, member: Member) -> None:
        self._outbox.send(
            member.id, "regroup", generation=self.number + 1, why=self.why, urgent=self.urgent
        )

    def tick(self, now: float) -> list[Member]:
        """Apply deadlines; return the members that should have arrived by now."""
        if self.phase is not Phase.GATHERING:
            return []
        if self._short is not None and now - self._short > self._settings.wait:
            self.end("failed", f"{self._shortage()} after {self._settings.wait:g} s of waiting")
            return []
        self.try_to_form(now)
        if now - self._reminded >= _REPEAT:
            self._remind(now)
        # Members follow an order that is not urgent after their next update, all at once: so the
        # clock starts when the first one arrives.
        since = self._ordered if self.urgent else self._first
        if self.is_first or since is None:
            return []
        return [member for member in self.awaited() if self.lateness.is_late(member, now - since)]

    def _remind(self, now: float) -> None:
        """Tell waiting members why they wait; the future leader shows the reason to people."""
        self._reminded = now
        why = self._waiting()
        leads = chosen(self._roster, self.current)[:1]
        for member in self._roster:
            if member.arrival is not None:
                self._outbox.send(member.id, "waiting", why=why, tell=member in leads)

    def _waiting(self) -> str:
        if self._short is not None:
            return f"{self._shortage()}: waiting for more to join"
        names = [str(member) for member in self.awaited()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"waiting for {', '.join(names[:_NAMED]) or 'those that start'}{more}"

    def _shortage(self) -> str:
        count = sum(member.arrival is not None for member in self._roster)
        return f"{count} of at least {max(1, self._settings.min_workers)} members are left"

    def over(self, status: str) -> None:
        """Training is over for all with this status: let members leave one by one."""
        if self.is_over:
            return
        self.closing(status)
        self._outbox.note("over", status=status)
        for member in self._roster:
            if member.arrival is not None or member.generation != self.number:
                self._say_end(member)

    def failed(self, why: str) -> None:
        """End the run for all because of a member's error; accept the members' last records."""
        if self.phase is Phase.ENDED or self._hears_last_words:
            return
        self.closing("failed", why)
        self._outbox.note("over", status="failed", why=why)
        for member in self._roster:
            self._say_end(member)

    def end(self, status: str, why: str) -> None:
        if self.phase is Phase.ENDED:
            return
        # Between two generations no member leads: the next leader then saves the run's state.
        waits = self.phase is Phase.GATHERING
        heirs = chosen(self._roster, self.current)[:1] if waits else []
        self.finished(status, why)
        for member in self._roster:
            self._say_end(member, leads=member in heirs)
        version = self._versions.recorded
        self._outbox.note("finished", status=status, version=version, why=why)

    def _say_end(self, member: Member, *, leads: bool = False) -> None:
        recorded = self._versions.recorded if leads else None
        self._outbox.send(
            member.id, "end", why=self.ending, hears=self._hears_last_words, recorded=recorded
        )

    @property
    def _hears_last_words(self) -> bool:
        """Whether members that know of the run's end may still report updates."""
        failed = self.last_word is not None and self.last_word[0] == "failed"
        return self.phase is Phase.CLOSING and failed

    @property
    def ending(self) -> str:
        return self.last_word[1] if self.last_word else "the run has ended"

    def closing(self, status: str, why: str | None = None) -> None:
        self.phase, self.last_word = Phase.CLOSING, (status, why or status)

    def finished(self, status: str, why: str) -> None:
        """Enter the final phase."""
        self.phase, self.last_word = Phase.ENDED, (status, why)

    def restore(self, formation: Formation) -> None:
        """Make this the current generation."""
        self.current, self.phase, self.urgent = formation, Phase.FORMED, False
        self._first = self._short = None
        self.lateness.formed()

    def begin(self, number: int) -> None:
        """Wait for the members started together; earlier starts used numbers to `number`."""
        self.current, self.phase, self.last_word = Formation(number), Phase.GATHERING, None

    def gone_on_with(self, now: float) -> None:
        """Regroup if the previous coordinator journaled a loss but was killed before it reacted."""
        living = [member for member in self.current.order if self._roster.get(member) is not None]
        if self.phase is Phase.FORMED and len(living) < len(self.current.order):
            self._gather(now, "a member is lost", urgent=True)


def chosen(here: Iterable[Member], before: Formation) -> list[Member]:
    """Return the members that have arrived: survivors in their old order, then newcomers.

    Newcomers are in the order of their arrival; in the first generation members started together
    come first, by number.
    """
    arrived = {member.id: member for member in here if member.arrival is not None}
    old = [arrived.pop(member) for member in before.order if member in arrived]

    def rank(member: Member) -> tuple[float, int]:
        assert member.arrival is not None
        place = math.inf if before.members or member.number is None else member.number
        return place, member.arrival.order

    return old + sorted(arrived.values(), key=rank)


def formed(
    number: int, members: Sequence[Member], version: int, store: tuple[str, int]
) -> Formation:
    """Return the generation of these members, with the most advanced one as the source."""
    progress = [_progress(member, version) for member in members]
    people = [member.public() for member in members]
    best = max(progress)
    if best < [0]:
        others = list(range(1, len(members)))
        return Formation(number, people, 0, others, True, version, store)
    behind = [index for index, made in enumerate(progress) if made < best]
    source = progress.index(best) if behind else None
    return Formation(number, people, source, behind, False, version, store)


def _progress(member: Member, version: int) -> list[int]:
    """Return a member's progress; [-1] if its state is of no use.

    A member that was given up and came back may have made updates that the others do not have.
    """
    made = member.arrival.progress if member.arrival else []
    unknown = member.generation == 0 and made[:1] > [version]
    return [-1] if unknown else made


@dataclass(frozen=True)
class Formation:
    """A generation: its members in order, and which of them bring others up to date."""

    number: int = 0
    members: list[Message] = field(default_factory=list)
    source: int | None = None
    """Index of the member with the most advanced state; None if no member is behind."""
    behind: list[int] = field(default_factory=list)
    """Indices of the members that get their state from the source."""
    anew: bool = False
    """Whether no member has the run's state: then the source has to read a checkpoint."""
    version: int = 0
    """The last journaled version when it was formed."""
    store: tuple[str, int] = ("", 0)
    """Host and port of the store where its members exchange their addresses."""

    @cached_property
    def order(self) -> list[int]:
        return [member["id"] for member in self.members]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "number": self.number,
            "members": self.order,
            "version": self.version,
            "source": self.source,
            "behind": self.behind,
            **({"anew": True} if self.anew else {}),
        }

    def frame(self, member: int) -> tuple[bytes, bytes]:
        """Return the frame for this member, in two parts."""
        return encode_with(self._common, "generation", index=self._indices[member])

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {member: index for index, member in enumerate(self.order)}

    @cached_property
    def _common(self) -> bytes:
        """The part that is the same for all members. It is long, so it is encoded once."""
        return common_part(
            {
                "number": self.number,
                "members": self.members,
                "store": list(self.store),
                "name": f"generation-{self.number}",
                "source": self.source,
                "behind": self.behind,
                "anew": self.anew,
                "recorded": self.version,
            }
        )
