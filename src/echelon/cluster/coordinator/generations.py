"""Generation state machine.

Generations: fixed sets of members, formed anew whenever someone joins, leaves or dies.

       all expected members have arrived              someone is lost, or arrives
GATHERING ───────────────────────────▶ FORMED ───────────────────────────────▶ GATHERING …
    │ too few for too long                │ a member says that training is over, or has failed
    ▼                                     ▼
  ENDED ◀──────────────────────────── CLOSING      when the last member has left
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

# --- generations ---

_REPEAT = 1.0  # seconds between two words to one that waits
_NAMED = 3


class Phase(Enum):
    GATHERING = "gathering"
    FORMED = "formed"
    CLOSING = "closing"
    ENDED = "ended"


class Generations:
    """The state machine. It has no clock: whoever calls says what time it is."""

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
        """Since when there are too few."""
        self._unseen_gone = 0
        self._arrivals = 0
        self._barren = self._news = 0

    @property
    def number(self) -> int:
        return self.current.number

    @property
    def is_first(self) -> bool:
        """Whether none was formed yet: then all who were started together are awaited."""
        return not self.current.members

    @property
    def leader(self) -> int | None:
        return self.current.order[0] if self.current.order else None

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.CLOSING, Phase.ENDED)

    def arrived(self, now: float, member: Member, message: Message) -> None:
        """`member` has left its generation, or is a newcomer, and is ready for the next."""
        left = message["generation"]
        if left < member.generation:
            return  # sent again: its answer was under way
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
            why = message["why"] or "it is here to take part"  # a newcomer has lost nobody
            self._gather(now, f"{member}: {why}", urgent=left > 0)
        self.try_to_form(now)

    def lost(self, now: float, member: Member, why: str) -> None:
        """`member` is not in the roster any more."""
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
        """One of those started together ended before it said hello."""
        self._unseen_gone += 1
        self.try_to_form(now)

    def over(self, status: str) -> None:
        """Training is over for all: they leave one by one, and nobody is missed."""
        if self.is_over:
            return
        self.closing(status)
        self._outbox.note("over", status=status)
        for member in self._roster:
            if member.arrival is not None or member.generation != self.number:
                self._say_end(member)

    def failed(self, why: str) -> None:
        """A member's error ends the run for all; what they still have to tell is heard."""
        if self.phase is Phase.ENDED or self._hears_last_words:
            return
        self.closing("failed", why)
        self._outbox.note("over", status="failed", why=why)
        for member in self._roster:
            self._say_end(member)

    def end(self, status: str, why: str) -> None:
        if self.phase is Phase.ENDED:
            return
        # Where nobody leads any more, whoever would have is to save what there is.
        waits = self.phase is Phase.GATHERING
        heirs = chosen(self._roster, self.current)[:1] if waits else []
        self.finished(status, why)
        for member in self._roster:
            self._say_end(member, leads=member in heirs)
        version = self._versions.recorded
        self._outbox.note("finished", status=status, version=version, why=why)

    def returned(self, member: Member, generation: int) -> None:
        """Tell a member that has a new connection what it may have missed with the old one."""
        if self.phase is Phase.ENDED or self._hears_last_words:
            self._say_end(member)
            return
        if generation < member.generation:
            self._tell(member)
        if not self.is_first and member in self.awaited():
            self._order(member)

    def tick(self, now: float) -> list[Member]:
        """Let deadlines take effect; returns who should have arrived by now."""
        if self.phase is not Phase.GATHERING:
            return []
        if self._short is not None and now - self._short > self._settings.wait:
            self.end("failed", f"{self._shortage()} after {self._settings.wait:g} s of waiting")
            return []
        self.try_to_form(now)
        if now - self._reminded >= _REPEAT:
            self._remind(now)
        # An order that can wait is carried out by all at once: the clock runs from the first one.
        since = self._ordered if self.urgent else self._first
        if self.is_first or since is None:
            return []
        return [member for member in self.awaited() if self.lateness.is_late(member, now - since)]

    def awaited(self) -> list[Member]:
        """Who has to arrive before a generation is formed."""
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

    def restore(self, formation: Formation) -> None:
        """Be this generation."""
        self.current, self.phase, self.urgent = formation, Phase.FORMED, False
        self._first = self._short = None
        self.lateness.formed()

    def begin(self, number: int) -> None:
        """Wait for those started together, after generation `number` of an earlier start."""
        self.current, self.phase, self.last_word = Formation(number), Phase.GATHERING, None

    def gone_on_with(self, now: float) -> None:
        """Whoever sat here before may not have come to draw the conclusion of a loss."""
        living = [member for member in self.current.order if self._roster.get(member) is not None]
        if self.phase is Phase.FORMED and len(living) < len(self.current.order):
            self._gather(now, "a member is lost", urgent=True)

    def closing(self, status: str, why: str | None = None) -> None:
        self.phase, self.last_word = Phase.CLOSING, (status, why or status)

    def finished(self, status: str, why: str) -> None:
        """The run has ended, and everybody who was there knows."""
        self.phase, self.last_word = Phase.ENDED, (status, why)

    @property
    def _hears_last_words(self) -> bool:
        """Whether members that know of the run's end may still have updates to tell of."""
        failed = self.last_word is not None and self.last_word[0] == "failed"
        return self.phase is Phase.CLOSING and failed

    def _say_end(self, member: Member, *, leads: bool = False) -> None:
        recorded = self._versions.recorded if leads else None
        self._outbox.send(
            member.id, "end", why=self.ending, hears=self._hears_last_words, recorded=recorded
        )

    @property
    def ending(self) -> str:
        return self.last_word[1] if self.last_word else "the run has ended"

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

    def _unseen(self, now: float) -> int:
        """How many of those started together have not said hello, and still may."""
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

    def _remind(self, now: float) -> None:
        """Whoever waits hears why, and that somebody is there; who is to lead tells people."""
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


# --- formation ---
# A generation as it is told to its members.


@dataclass(frozen=True)
class Formation:
    """A fixed set of members in their order, and who of them needs what from whom."""

    number: int = 0
    members: list[Message] = field(default_factory=list)
    source: int | None = None
    """The index of one that everybody can be healed from; None if nobody has to be."""
    behind: list[int] = field(default_factory=list)
    anew: bool = False
    """Whether nobody has the run's state: the source has to begin where a checkpoint ends."""
    version: int = 0
    """On record when it was formed."""
    store: tuple[str, int] = ("", 0)
    """Where its members meet."""

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
        """What this member is told, in two parts."""
        return encode_with(self._common, "generation", index=self._indices[member])

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {member: index for index, member in enumerate(self.order)}

    @cached_property
    def _common(self) -> bytes:
        """The same for all, and long: encoded once."""
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


def formed(
    number: int, members: Sequence[Member], version: int, store: tuple[str, int]
) -> Formation:
    """The generation of these members; whoever is behind is healed by the most advanced one."""
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
    """One that was given up and is back may have made updates that nobody knows of any more."""
    made = member.arrival.progress if member.arrival else []
    unknown = member.generation == 0 and made[:1] > [version]
    return [-1] if unknown else made


def chosen(here: Iterable[Member], before: Formation) -> list[Member]:
    """Those who have arrived: survivors in their old order, then newcomers.

    Newcomers follow as they came; those started together by their number.
    """
    arrived = {member.id: member for member in here if member.arrival is not None}
    old = [arrived.pop(member) for member in before.order if member in arrived]

    def rank(member: Member) -> tuple[float, int]:
        assert member.arrival is not None
        place = math.inf if before.members or member.number is None else member.number
        return place, member.arrival.order

    return old + sorted(arrived.values(), key=rank)
