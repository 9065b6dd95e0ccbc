"""The gate: decides which pushes make which version, from synchronous to asynchronous training.

    enter ─▶ pull (begin) ─▶ push ─▶ pushes wait ─▶ Round ─▶ owed an outcome ─▶ Answer, with weights
                  ▲                      └─ done, late, refused, void ─────────▶ │
                  └──────────── meeting ◀── asked ◀──────────────────────────────┤
                                                     begins the next batch ◀─────┘

The gate is a pure state machine: it has no sockets, no tensors and no clock. A call returns
decisions, which the caller (dispatch.py) carries out in their order: a `Round` makes a version out
of pushes, an `Answer` ends a member's push or pull. A `Debt` is an answer that has to wait. Every
wait ends, because each member at work will push, rest, or be reported as left.

The rules (what makes a version, who may begin a batch) are in policy.py, the books (which samples
are applied, speed and merit of members) in accounting.py.
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

KEPT = 64
"""Versions whose records a synchronous run keeps: its members keep records themselves."""


class Gate:
    """Decides on pushes and pulls of the members of a generation. The caller serializes calls.

    `rules`: what trainers say of the job, see `Terms`. `parameters`: how many the model has, to
    notice pushes without any gradient; 0 if that does not matter. All times are in seconds.
    """

    def __init__(self, rules: Mapping[str, Any], parameters: int = 0) -> None:
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
        """Per member, the time at which it got the weights that it computes with."""

    # Calls of members

    def enter(self, now: float, generation: int, members: Sequence[int]) -> list[Decision]:
        """Open a generation with these members. Pushes and pulls of an older one become void.

        Every member calls it; only the first call changes anything. Raises TrainingError if the
        generation is over.
        """
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
        """Ask for weights: to `begin` the next batch with, or to look at them in a meeting.

        A synchronous run answers at once. So does any other unless the member begins a batch: then
        the policy may hold the answer back, as it does after a push.
        """
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

    def push(self, now: float, member: int, push: Push) -> list[Decision]:
        """Take a push that is staged on every shard: it waits for its update, or is turned away."""
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

    def rest(self, now: float, member: int) -> list[Decision]:
        """Expect no push of this member until it asks for weights again."""
        self._debts.drop(member)
        self._roll.rest(member)
        return self._settle(now)

    def left(self, now: float, member: int) -> list[Decision]:
        """Handle a lost member like one at rest. Its push is dropped if it was not applied yet."""
        return self.rest(now, member)

    def back(self, member: int) -> None:
        """Handle a member's new connection: it repeats its last push or pull.

        It still has the weights it computes with, so other members go on waiting for its push.
        """
        self._debts.drop(member)
        self._roll.ask_again(member)

    def knows(self, member: int, seq: int) -> bool:
        """Return whether this push was applied already."""
        return self._applied.was(member, seq) is not None

    def observe(self, schedule: Mapping[str, Any]) -> None:
        """Set the schedule's state, as trainers report it after a validation result."""
        self._terms.schedule.load_state_dict(dict(schedule))

    def leave_out(self, member: int, lease: Lease) -> None:
        """Count samples as done without an update, because their gradient is not finite."""
        self._applied.leave_out(member, lease, self.version)

    # Records and state

    def records(self, after: int) -> list[Record]:
        """Return what was applied after this version, in order."""
        return self._applied.records(after)

    def recorded(self, version: int) -> None:
        """Drop records up to this version: the run's journal has them."""
        self._applied.recorded(version)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return, by member, how its pushes ended, how old they were, and its merit."""
        found = self._counts.figures()
        for member, merit in (self._merits.figures() if self._merits else {}).items():
            found.setdefault(str(member), {}).update(merit)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the gate's part of a checkpoint, and under `pending` what only a gate that takes
        over in mid-run needs: its twin, which goes on within the generation."""
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
        """Load a state. Members have to enter again, unless it has `pending`."""
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

    def _notice(self, now: float, member: int, push: Push) -> None:
        """Note what a push says about requests to meet, the member's merit and its speed."""
        if not self._terms.together:
            self._asks.hear(push.asked)
            self._asks.reached_end(self.version)
        if self._merits is not None and push.makes_sense:
            self._merits.note(member, push.row.merit, self._roll.members)
        if (began := self._began.pop(member, None)) is not None:
            self._speeds.note(member, push.lease.size, now - began)

    def _judge(self, member: int, push: Push) -> Verdict | None:
        """Turn a push away if its member does harm and others are left to take its samples."""
        if self._terms.together or self._weight(member) or not self._roll.busy(but=(member,)):
            return None
        assert self._merits is not None
        return "late", self.version - push.based_on, self._merits.reject(member)

    def _weight(self, member: int) -> float:
        return self._merits.weight(member, self._roll.members) if self._merits else 1.0

    def _fenced(self, member: int, push: Push) -> str:
        """Return why a push does not belong to this generation."""
        if member not in self._roll.members:
            return f"member {member} is none of generation {self.generation}"
        return f"generation {push.head.generation} is over: this is {self.generation}"

    def _refusal(self, member: int, push: Push, reason: str) -> Answer:
        self._counts.note(member, "void")
        return Answer(member, push.seq, Outcome("void", self.version, reason=reason))

    def _void(self, now: float, reason: str) -> list[Decision]:
        """Answer all waiting members without weights; applied pushes stay applied."""
        found: list[Decision] = [
            self._refusal(member, push, reason) for member, push in self._roll.waiting.items()
        ]
        while debt := self._debts.next(lambda _: True):
            answer = self._answer(now, debt, begins=False)
            found.append(Answer(answer.member, answer.seq, answer.outcome._replace(weights=False)))
        return found

    # Decisions

    def _settle(self, now: float) -> list[Decision]:
        """Make updates and answer members until nothing more can be done; return the decisions."""
        found: list[Decision] = []
        while True:
            if members := self._way.chosen(self._roll, self.version):
                found += self._update(members)
                self._turn_away_if_over()
            elif debt := self._debts.next(self._may_answer):
                found.append(self._answer(now, debt, begins=not self._asks.bits))
            else:
                return found

    def _update(self, members: Sequence[int]) -> list[Decision]:
        """Make the next version of these members' pushes, or refuse all of them."""
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
        if not self._terms.together:  # synchronous members hear of it in the row, all at once
            self._asks.reached(made.version)
        return [made]

    def _round(self, pushes: Sequence[tuple[int, Push]]) -> Round:
        """Return the round of those pushes that do no harm; an empty one if there are none."""
        good = [(member, push) for member, push in pushes if self._weight(member)]
        for member in {member for member, _ in pushes} - {member for member, _ in good}:
            assert self._merits is not None
            self._merits.reject(member)
        if sum(push.row.divisor for _, push in good) <= 0:
            return Round(self.version + 1, (), 1.0, self._terms.schedule.factor(self.version))
        weight = sum(self._weight(member) for member, _ in good) / len(good)
        return round_of(self._terms, self.version, good, weight, len(self._roll.members))

    def _turn_away_if_over(self) -> None:
        """After the last version, end the pushes that still wait."""
        if not self._terms.together and self._terms.is_over(self.version):
            for member, push in list(self._roll.waiting.items()):
                self._roll.settled(member)
                age = self.version - push.based_on
                self._debts.add(Debt(member, push.seq, "late", age, "all steps are done"))

    def _may_answer(self, member: int) -> bool:
        """Return whether a member may have its answer now. One that is asked to meet need not
        wait, because it does not begin a batch."""
        return bool(self._asks.bits) or self._way.may_begin(self._roll, member)

    def _answer(self, now: float, debt: Debt, *, begins: bool) -> Answer:
        """Return the answer with the weights. `begins`: the member computes with them next."""
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

    def _share(self, member: int) -> float:
        """Return how many samples the member's next push should have; 0 if members agree on it
        themselves."""
        terms, members = self._terms, self._roll.members
        if terms.batch is None:
            return 0.0
        if terms.by_speed:
            return self._speeds.share(member, members, terms.batch)
        return self._way.share(len(members), terms.batch)


# Replies that wait for weights

_ASKED = Row._fields.index("asked")


class Debts:
    """Outcomes of members that wait for weights, oldest first, and the sums that go with them.

    With its outcome a member gets the sums of all rows since its last outcome.
    """

    def __init__(self) -> None:
        self._debts: dict[int, Debt] = {}
        """At most one for each member, in the order they came."""
        self._rows: dict[int, list[float]] = {}
        """Per member, the sums since its last outcome."""
        self._told: dict[int, tuple[int, tuple[float, ...]]] = {}
        """Per member, its last push that was answered and the sums it got. If the gate is lost with
        the answer, the member repeats the push, and a gate that takes over repeats the sums."""

    def add(self, debt: Debt) -> None:
        self._debts[debt.member] = debt

    def drop(self, member: int) -> None:
        """Drop a member's outcome: it asks for something else, or is lost."""
        self._debts.pop(member, None)

    def next(self, may: Callable[[int], bool]) -> Debt | None:
        """Remove and return the oldest outcome that may be sent now, or None."""
        for member in self._debts:
            if may(member):
                return self._debts.pop(member)
        return None

    def sum(self, rows: Sequence[Row], members: Iterable[int]) -> None:
        """Add an update's rows to the sums of all members."""
        total = [sum(column) for column in zip(*(row[:SUMMED] for row in rows), strict=True)]
        for member in members:
            held = self._rows.setdefault(member, [0.0] * len(total))
            for at, value in enumerate(total):
                held[at] += value

    def row(self, debt: Debt, with_asked: bool) -> tuple[float, ...]:
        """Return and clear the member's sums; for a push that is repeated, return the same again.

        `with_asked`: whether they include the requests to meet.
        """
        member = debt.member
        row = self._rows.pop(member, None)
        if row is None:
            seq, told = self._told.get(member, (0, ()))
            return told if seq == debt.seq else ()
        if not with_asked:  # `Asks` has them as bits: sums over many updates would overflow
            row[_ASKED] = 0.0
        self._told[member] = debt.seq, tuple(row)
        return tuple(row)

    def clear(self) -> None:
        self._debts.clear()
        self._rows.clear()
        self._told.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums alone: members repeat their requests if another gate takes over."""
        told = [[member, seq, list(row)] for member, (seq, row) in self._told.items()]
        return {"rows": [[m, list(row)] for m, row in self._rows.items()], "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._debts.clear()
        self._rows = {member: list(row) for member, row in state["rows"]}
        self._told = {member: (seq, tuple(row)) for member, seq, row in state["told"]}


@dataclass(frozen=True, slots=True)
class Debt:
    """An outcome that a member waits for."""

    member: int
    seq: int
    """The number of the push; 0 for a pull."""
    fate: str
    """`kind` of the `Outcome`."""
    staleness: int = 0
    reason: str = ""


# Requests to meet

KINDS = tuple(kind for kind in Ask if kind not in (Ask.NOTHING, Ask.BALANCE))
"""Reasons to ask members to meet. `BALANCE` is none of them: the gate itself decides how many
samples a trainer gets."""


class Asks:
    """Requests that all members meet (to save a checkpoint, say), in a run that is not synchronous.

    A member that knows of a request pushes nothing more and rests in the meeting. The meeting is
    over when a member begins a batch while all others rest and know of the request; requests that
    came up later stay open.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.bits = 0
        """Open requests, a bit for each kind."""
        self._told: dict[int, int] = {}
        """Per member, the bits in its last answer."""

    def hear(self, asked: int) -> None:
        """Open the requests that came with a push."""
        for kind in KINDS:
            if kind.among(asked):
                self.bits |= kind

    def reached(self, version: int) -> None:
        """Ask all to meet if something is due at this version, or it is the last one."""
        if any(version % every == 0 for every in self._terms.due):
            self.bits |= Ask.MEET
        self.reached_end(version)

    def reached_end(self, version: int) -> None:
        if self._terms.is_over(version):
            self.bits |= Ask.MEET

    def tell(self, member: int) -> int:
        """Return the open requests for an answer to this member, and note that it knows them."""
        self._told[member] = self.bits
        return self.bits

    def met(self, members: Collection[int]) -> None:
        """Close the requests that every member knows of, after a meeting."""
        known = self.bits
        for member in members:
            known &= self._told.get(member, 0)
        self.bits &= ~known

    def clear(self) -> None:
        self.bits = 0
        self._told.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "told": [list(pair) for pair in self._told.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bits = state["bits"]
        self._told = dict(state["told"])


# Statistics


class Counts:
    """How many pushes of each member ended in which way, and how stale the applied ones were."""

    def __init__(self) -> None:
        self._fates: dict[int, Counter[str]] = {}
        self._ages: dict[int, Counter[int]] = {}

    def note(self, member: int, fate: str, staleness: int = 0) -> None:
        self._fates.setdefault(member, Counter())[fate] += 1
        if fate == "applied":
            self._ages.setdefault(member, Counter())[staleness] += 1

    def figures(self) -> dict[str, dict[str, float]]:
        """Return counts by member: applied, done (repeated), late, refused, void; staleness_0, …"""
        found: dict[str, dict[str, float]] = {}
        for member, fates in sorted(self._fates.items()):
            ages = self._ages.get(member, Counter())
            found[str(member)] = {**fates, **{f"staleness_{n}": ages[n] for n in sorted(ages)}}
        return found
