"""Which pushes make which version (pure state machine).

Which pushes make which version: one dial from synchronous to asynchronous.

    enter ─▶ pull (begin) ─▶ push ─▶ pushes wait ─▶ Round ─▶ owed an outcome ─▶ Answer, with weights
                  ▲                      └─ done, late, refused, void ─────────▶ │
                  └──────────── meeting ◀── asked ◀──────────────────────────────┤
                                                     begins the next batch ◀─────┘

Pure: it has no sockets, no tensors and no clock. Whoever calls it carries the decisions out in
their order. All waiting ends because somebody at work pushes, rests, or is said to have left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.comm.ps.messages import Outcome
from echelon.core.errors import TrainingError
from echelon.core.types import Ask, Lease
from echelon.server.accounting import Applied, Record, Speeds, merits_of
from echelon.server.decisions import SUMMED, Answer, Decision, Push, Round, Row
from echelon.server.policy import Examiner, Roll, Terms, Verdict, round_of, way_of

# --- gate ---

KEPT = 64
"""Versions whose records are kept in a synchronous run, whose members keep their own."""


class Gate:
    def __init__(self, rules: Mapping[str, Any], parameters: int = 0) -> None:
        """`parameters`: how many there are, to notice pushes without any gradient."""
        self._terms = terms = Terms.of(rules)
        self._way = way_of(terms)
        self.version = self.generation = 0
        self._roll = Roll()
        self._asks = Asks(terms)
        self._speeds = Speeds()
        self._counts = Counts()
        self._merits = merits_of(rules.get("merit"))
        self._debts = Debts()
        self._applied = Applied(terms.samples, KEPT if terms.together else None)
        self._examiner = Examiner(terms, self._way, parameters)
        self._began: dict[int, float] = {}

    # Members.

    def enter(self, now: float, generation: int, members: Sequence[int]) -> list[Decision]:
        """Open a generation: what is under way of an older one is void."""
        if generation < self.generation:
            raise TrainingError(
                f"generation {generation} is over: this is generation {self.generation}"
            )
        if generation == self.generation and set(members) == self._roll.members:
            return []
        answers = self._void(now, f"generation {self.generation} is over")
        self.generation = generation
        self._roll = Roll(members)
        self._asks.clear()
        self._debts.clear()
        self._speeds.forget(but=self._roll.members)
        self._began.clear()
        return answers

    def pull(self, now: float, member: int, *, begin: bool = True) -> list[Decision]:
        """Weights, to `begin` the next batch with, or to look at in a meeting."""
        self._debts.drop(member)
        if not begin or self._terms.together or member not in self._roll.members:
            self._roll.rest(member, meets=True)
            self._asks.tell(member)
            return [self._answer(now, Debt(member, 0, "pulled"), begins=False), *self._settle(now)]
        if self._roll.all_away:
            self._asks.met(self._roll.members)
            self._roll.come_back()
        self._roll.settled(member)
        self._debts.add(Debt(member, 0, "pulled"))
        return self._settle(now)

    def rest(self, now: float, member: int) -> list[Decision]:
        """It has nothing to compute: nobody has to wait for it."""
        self._debts.drop(member)
        self._roll.rest(member)
        return self._settle(now)

    def back(self, member: int) -> None:
        """What it asked for it asks again; others go on waiting for the push it computes."""
        self._debts.drop(member)
        self._roll.ask_again(member)

    def left(self, now: float, member: int) -> list[Decision]:
        """It is gone; if its push waits to be applied, nothing comes of it."""
        return self.rest(now, member)

    # Updates.

    def push(self, now: float, member: int, push: Push) -> list[Decision]:
        self._debts.drop(member)
        if push.head.generation != self.generation or member not in self._roll.members:
            return [self._refusal(member, push, self._fenced(member, push))]
        self._notice(now, member, push)
        verdict = self._examiner.examine(member, push, self.version, self._roll, self._applied)
        verdict = verdict or self._judge(member, push)
        if verdict is not None:
            self._roll.settled(member)
            self._debts.add(Debt(member, push.seq, *verdict))
        else:
            self._roll.wait(member, push)
        return self._settle(now)

    def knows(self, member: int, seq: int) -> bool:
        """Whether this push is part of an update already."""
        return self._applied.was(member, seq) is not None

    def observe(self, schedule: Mapping[str, Any]) -> None:
        """The schedule's state after a validation result, which every trainer says."""
        self._terms.schedule.load_state_dict(dict(schedule))

    def leave_out(self, member: int, lease: Lease) -> None:
        """These samples are done with, without an update: theirs is not finite."""
        self._applied.leave_out(member, lease, self.version)

    # Records and state.

    def records(self, after: int) -> list[Record]:
        """What is applied after this version, in its order."""
        return self._applied.records(after)

    def recorded(self, version: int) -> None:
        """What came up to this version is on record, and need not be kept."""
        self._applied.recorded(version)

    def figures(self) -> dict[str, dict[str, float]]:
        """By member: what became of its pushes, how old they were, its merit."""
        found = self._counts.figures()
        for member, merit in (self._merits.figures() if self._merits else {}).items():
            found.setdefault(str(member), {}).update(merit)
        return found

    def state_dict(self) -> dict[str, Any]:
        """A cut's part, and `pending`: what only a gate that takes over wants to know."""
        return {
            "version": self.version,
            "schedule": self._terms.schedule.state_dict(),
            "ledger": self._applied.state_dict(),
            "pending": {
                "generation": self.generation,
                "applied": self._applied.pending(),
                "roll": self._roll.state_dict(),
                "asks": self._asks.state_dict(),
                "debts": self._debts.state_dict(),
                "merits": self._merits.state_dict() if self._merits else None,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what a cut says. Members have to enter again, unless there is `pending`."""
        self.version, self.generation = int(state.get("version", 0)), 0
        self._roll = Roll()
        self._asks.clear()
        self._debts.clear()
        if schedule := state.get("schedule"):
            self._terms.schedule.load_state_dict(schedule)
        nothing: dict[str, Any] = {"samples": self._terms.samples, "whole": [], "parts": []}
        self._applied.load_state_dict(state.get("ledger") or nothing)
        if pending := state.get("pending"):
            self.generation = pending["generation"]
            self._applied.load_pending(pending["applied"])
            self._roll = Roll.of(pending["roll"])
            self._asks.load_state_dict(pending["asks"])
            self._debts.load_state_dict(pending["debts"])
            if self._merits and pending["merits"]:
                self._merits.load_state_dict(pending["merits"])

    # How decisions are made.

    def _settle(self, now: float) -> list[Decision]:
        """Whatever can be done now is."""
        found: list[Decision] = []
        while True:
            if members := self._way.chosen(self._roll, self.version):
                found += self._update(members)
                self._turn_away_if_over()
            elif debt := self._debts.next(self._may_answer):
                found.append(self._answer(now, debt, begins=not self._asks.bits))
            else:
                return found

    def _turn_away_if_over(self) -> None:
        if not self._terms.together and self._terms.is_over(self.version):
            for member, push in list(self._roll.waiting.items()):
                self._roll.settled(member)
                age = self.version - push.based_on
                self._debts.add(Debt(member, push.seq, "late", age, "all steps are done"))

    def _may_answer(self, member: int) -> bool:
        return bool(self._asks.bits) or self._way.may_begin(self._roll, member)

    def _update(self, members: Sequence[int]) -> list[Decision]:
        pushes = [(member, self._roll.waiting[member]) for member in members]
        for member in members:
            self._roll.settled(member)
        if reason := self._examiner.fault(pushes):
            for member, push in pushes:
                self._debts.add(Debt(member, push.seq, "refused", 0, reason))
            return []
        made = self._round(pushes)
        self.version = made.version
        for member, push in pushes:
            self._applied.add(member, push.seq, push.lease, made.version)
            age = made.version - 1 - push.based_on
            self._debts.add(Debt(member, push.seq, "applied", age))
        self._debts.sum([push.row for _, push in pushes], self._roll.members)
        if not self._terms.together:  # or all hear it with the sums, after the same update
            self._asks.reached(made.version)
        return [made]

    def _answer(self, now: float, debt: Debt, *, begins: bool) -> Answer:
        """The outcome, with weights; whoever is asked to meet does not begin another batch."""
        member = debt.member
        if begins and not self._terms.together:
            self._roll.begin(member, self.version)
            self._began[member] = now
        elif not self._terms.together:
            self._roll.rest(member, meets=True)
        self._counts.note(member, debt.fate, debt.staleness)
        outcome = Outcome(
            kind=debt.fate,
            version=self.version,
            staleness=debt.staleness,
            row=() if debt.fate == "pulled" else self._debts.row(debt, self._terms.together),
            asked=self._asks.tell(member),
            share=self._share(member),
            reason=debt.reason,
            weights=True,
        )
        return Answer(member, debt.seq, outcome)

    def _weight(self, member: int) -> float:
        return self._merits.weight(member, self._roll.members) if self._merits else 1.0

    def _judge(self, member: int, push: Push) -> Verdict | None:
        """One that does harm is turned away, and its samples go to others if there are any."""
        if self._terms.together or self._weight(member) or not self._roll.busy(but=(member,)):
            return None
        assert self._merits is not None
        return "late", self.version - push.based_on, self._merits.reject(member)

    def _round(self, pushes: Sequence[tuple[int, Push]]) -> Round:
        """Of those that do no harm; without any it is an update of nothing."""
        good = [(member, push) for member, push in pushes if self._weight(member)]
        for member in {member for member, _ in pushes} - {member for member, _ in good}:
            assert self._merits is not None
            self._merits.reject(member)
        if sum(push.row.divisor for _, push in good) <= 0:
            return Round(self.version + 1, (), 1.0, self._terms.schedule.factor(self.version))
        weight = sum(self._weight(member) for member, _ in good) / len(good)
        return round_of(self._terms, self.version, good, weight, len(self._roll.members))

    def _share(self, member: int) -> float:
        terms, members = self._terms, self._roll.members
        if terms.batch is None:
            return 0.0
        if terms.by_speed:
            return self._speeds.share(member, members, terms.batch)
        return self._way.share(len(members), terms.batch)

    def _notice(self, now: float, member: int, push: Push) -> None:
        if not self._terms.together:
            self._asks.hear(push.asked)
            self._asks.reached_end(self.version)
        if self._merits is not None and push.makes_sense:
            self._merits.note(member, push.row.merit, self._roll.members)
        if (began := self._began.pop(member, None)) is not None:
            self._speeds.note(member, push.lease.size, now - began)

    def _fenced(self, member: int, push: Push) -> str:
        if member not in self._roll.members:
            return f"member {member} is none of generation {self.generation}"
        return f"generation {push.head.generation} is over: this is {self.generation}"

    def _refusal(self, member: int, push: Push, reason: str) -> Answer:
        self._counts.note(member, "void")
        return Answer(member, push.seq, Outcome("void", self.version, reason=reason))

    def _void(self, now: float, reason: str) -> list[Decision]:
        """Nobody gets weights any more; what is applied is applied."""
        found: list[Decision] = [
            self._refusal(member, push, reason) for member, push in self._roll.waiting.items()
        ]
        while debt := self._debts.next(lambda _: True):
            answer = self._answer(now, debt, begins=False)
            found.append(Answer(answer.member, answer.seq, answer.outcome._replace(weights=False)))
        return found


# --- debts ---
# Outcomes that are owed: those who wait for weights, and what was summed up for each meanwhile.

_ASKED = Row._fields.index("asked")


@dataclass(frozen=True, slots=True)
class Debt:
    member: int
    seq: int
    fate: str
    staleness: int = 0
    reason: str = ""


class Debts:
    """First come, first served."""

    def __init__(self) -> None:
        self._debts: dict[int, Debt] = {}
        self._rows: dict[int, list[float]] = {}
        self._told: dict[int, tuple[int, tuple[float, ...]]] = {}
        """What each was told last, and of which push: the answer may be lost with its gate."""

    def add(self, debt: Debt) -> None:
        self._debts[debt.member] = debt

    def drop(self, member: int) -> None:
        """It asks for something else, or is gone."""
        self._debts.pop(member, None)

    def next(self, may: Callable[[int], bool]) -> Debt | None:
        """The first that may be paid; it is paid then."""
        for member in self._debts:
            if may(member):
                return self._debts.pop(member)
        return None

    def sum(self, rows: Sequence[Row], members: Iterable[int]) -> None:
        """An update with these rows is made: all members are to hear of it."""
        total = [sum(column) for column in zip(*(row[:SUMMED] for row in rows), strict=True)]
        for member in members:
            held = self._rows.setdefault(member, [0.0] * len(total))
            for at, value in enumerate(total):
                held[at] += value

    def row(self, debt: Debt, with_asked: bool) -> tuple[float, ...]:
        """What was summed up since this member was last told; for the same push, the same."""
        member = debt.member
        row = self._rows.pop(member, None)
        if row is None:
            seq, told = self._told.get(member, (0, ()))
            return told if seq == debt.seq else ()
        if not with_asked:  # those are told as bits: sums of many updates would run over
            row[_ASKED] = 0.0
        self._told[member] = debt.seq, tuple(row)
        return tuple(row)

    def clear(self) -> None:
        self._debts.clear()
        self._rows.clear()
        self._told.clear()

    def state_dict(self) -> dict[str, Any]:
        """The sums alone: whoever is owed an outcome asks again where another gate takes over."""
        told = [[member, seq, list(row)] for member, (seq, row) in self._told.items()]
        return {"rows": [[m, list(row)] for m, row in self._rows.items()], "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._debts.clear()
        self._rows = {member: list(row) for member, row in state["rows"]}
        self._told = {member: (seq, tuple(row)) for member, seq, row in state["told"]}


# --- asks ---
# Who wants all to meet, and who knows of it.
#
# Whoever is told goes to the meeting and pushes nothing before it is over. It is over when
# somebody begins anew and all others are away and know of it; whatever came up later stays to be
# told.

KINDS = tuple(kind for kind in Ask if kind not in (Ask.NOTHING, Ask.BALANCE))
"""Nobody has to meet for its speed: how much a trainer gets is decided here."""


class Asks:
    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.bits = 0
        """One of each kind that is asked for."""
        self._told: dict[int, int] = {}

    def hear(self, asked: int) -> None:
        """What a push brings: kinds, added up over members."""
        for kind in KINDS:
            if kind.among(asked):
                self.bits |= kind

    def reached(self, version: int) -> None:
        """All have to meet where something is due, and at the end."""
        if any(version % every == 0 for every in self._terms.due):
            self.bits |= Ask.MEET
        self.reached_end(version)

    def reached_end(self, version: int) -> None:
        if self._terms.is_over(version):
            self.bits |= Ask.MEET

    def tell(self, member: int) -> int:
        """What this member has to know, which it now does."""
        self._told[member] = self.bits
        return self.bits

    def met(self, members: Collection[int]) -> None:
        """All are away: what everybody knows of is done with."""
        known = self.bits
        for member in members:
            known &= self._told.get(member, 0)
        self.bits &= ~known

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "told": [list(pair) for pair in self._told.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bits = state["bits"]
        self._told = dict(state["told"])

    def clear(self) -> None:
        self.bits = 0
        self._told.clear()


# --- counts ---
# What became of each member's pushes, in numbers.


class Counts:
    def __init__(self) -> None:
        self._fates: dict[int, Counter[str]] = {}
        self._ages: dict[int, Counter[int]] = {}

    def note(self, member: int, fate: str, staleness: int = 0) -> None:
        self._fates.setdefault(member, Counter())[fate] += 1
        if fate == "applied":
            self._ages.setdefault(member, Counter())[staleness] += 1

    def figures(self) -> dict[str, dict[str, float]]:
        """By member: applied, done (again), late, refused, void; staleness_0, staleness_1, …"""
        found: dict[str, dict[str, float]] = {}
        for member, fates in sorted(self._fates.items()):
            ages = self._ages.get(member, Counter())
            found[str(member)] = {**fates, **{f"staleness_{n}": ages[n] for n in sorted(ages)}}
        return found
