"""A simulated world around a gate: trainers of all speeds that die, join, lose their connection and
repeat messages. It checks the invariants at every step, and that every wait ends."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from echelon.comm.ps.messages import PushHead
from echelon.core.types import Ask, Lease
from echelon.data.intervals import Intervals
from echelon.server.decisions import Answer, Decision, Push, Round
from echelon.server.gate import Gate

TROUBLES = ("dies", "dies late", "joins", "breaks", "breaks late", "gate")


@dataclass
class Trainer:
    id: int
    speed: float
    alive: bool = True
    generation: int = 0
    version: int = -1
    lease: Lease | None = None
    share: int = 1
    sent: Push | None = None
    asking: int = 0
    """Of its pushes and pulls, the last."""
    awaits: str = ""
    """`push`, `pull`, `look` or nothing."""
    meeting: bool = False
    applied: int = 0


@dataclass
class World:
    rules: dict[str, Any]
    trainers: int
    random: Random
    samples: int = 200
    epochs: int = 2
    trouble: float = 0.0
    """How often something goes wrong, per push."""
    troubles: Sequence[str] = TROUBLES
    gate: Gate = field(init=False)
    now: float = 0.0
    epoch: int = 0
    ended: bool = False
    version: int = 0
    generation: int = 0
    ages: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    fates: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = {"samples": self.samples, "batch": 12} | self.rules
        self.gate = Gate(self.rules)
        self.mirrored = json.dumps(self.gate.state_dict())
        """What the gate's twin has."""
        self.strangers: set[int] = set()
        """Who has not talked to the gate that took over."""
        self.free = Intervals([(0, self.samples)])
        self.done: dict[int, Intervals] = {}
        self.known: dict[int, Intervals] = {}
        self.recorded = 0
        self.pushes: dict[tuple[int, int], Push] = {}
        self.members: dict[int, Trainer] = {}
        self.zombies: list[tuple[int, Push]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._seqs = itertools.count(1)
        self._ids = itertools.count()
        for _ in range(self.trainers):
            self._add()

    # Events.

    def run(self, most: int = 200_000) -> None:
        self._regroup()
        for _ in range(most):
            if self.ended:
                return
            assert self._events, f"a deadlock: {list(self.members.values())}"
            self.now, _, event = heapq.heappop(self._events)
            event()
        raise AssertionError("it never ends")

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _add(self) -> Trainer:
        trainer = Trainer(next(self._ids), self.random.choice([1.0, 1.0, 3.0, 20.0]))
        self.members[trainer.id] = trainer
        return trainer

    def _regroup(self) -> None:
        """Stop all trainers, return their leases, and begin a new generation."""
        generation = self.generation = self.generation + 1
        for trainer in self.members.values():
            self._give_back(trainer)
            trainer.generation = generation
            trainer.awaits, trainer.meeting, trainer.sent = "", False, None
        self.strangers = set()
        self._carry_out(self.gate.enter(self.now, generation, list(self.members)))
        for trainer in list(self.members.values()):
            self._begin(trainer)

    # Trainers.

    def _begin(self, trainer: Trainer) -> None:
        trainer.meeting, trainer.awaits = False, "pull"
        trainer.asking += 1
        self._greet(trainer)
        self._carry_out(self.gate.pull(self.now, trainer.id))

    def _compute(self, trainer: Trainer) -> None:
        if not self.free:
            self._go_to_meeting(trainer, rest=True)
            return
        size = max(1, min(self.random.choice([trainer.share, trainer.share // 2 + 1]), 40))
        trainer.lease = Lease(self.epoch, *self.free.pop(size))
        generation = trainer.generation
        seconds = trainer.lease.size * trainer.speed * self.random.uniform(0.8, 1.2)
        self._later(seconds, lambda: self._computed(trainer, generation))

    def _computed(self, trainer: Trainer, generation: int) -> None:
        if not trainer.alive or trainer.generation != generation:
            return
        push = self._push_of(trainer)
        if self.random.random() < self.trouble and self._go_wrong(trainer, push):
            return
        self._send(trainer, push)

    def _push_of(self, trainer: Trainer) -> Push:
        assert trainer.lease is not None
        asked = float(Ask.REGROUP if self.random.random() < 0.02 else 0)
        row = (float(trainer.lease.size), float(trainer.lease.size), 1.0, asked, 1.0)
        head = PushHead(trainer.generation, trainer.lease, trainer.version, row)
        return Push(next(self._seqs), head)

    def _send(self, trainer: Trainer, push: Push) -> None:
        trainer.sent, trainer.awaits = push, "push"
        trainer.asking += 1
        self.pushes[trainer.id, push.seq] = push
        self._greet(trainer)
        self._carry_out(self.gate.push(self.now, trainer.id, push))

    def _go_wrong(self, trainer: Trainer, push: Push) -> bool:
        what = self.random.choice(self.troubles)
        if what == "gate":
            self._send(trainer, push)
            self._take_over()
            return True
        if what.startswith("dies"):
            if what == "dies late":  # its push is on its way when it dies
                self._send(trainer, push)
            self._die(trainer, push)
            return True
        if what == "joins":
            self._add()
            self._give_back(trainer)
            self._regroup()
            return True
        if what == "breaks late":
            self._send(trainer, push)
        trainer.awaits, trainer.sent = "push", push
        self.pushes[trainer.id, push.seq] = push
        self._carry_out(self.gate.left(self.now, trainer.id))
        generation = trainer.generation
        self._later(self.random.uniform(0, 50), lambda: self._again(trainer, push, generation))
        return True

    def _take_over(self) -> None:
        """Replace the gate by its twin, which knows all answers that were sent."""
        self.gate = Gate(self.rules)
        self.gate.load_state_dict(json.loads(self.mirrored))
        self.strangers = set(self.members)
        for trainer in self.members.values():
            if trainer.awaits:
                self._later(self.random.uniform(0, 50), self._asks_again(trainer))

    def _asks_again(self, trainer: Trainer) -> Callable[[], None]:
        asking, push, generation = trainer.asking, trainer.sent, trainer.generation

        def again() -> None:
            if not trainer.alive or trainer.generation != generation or trainer.asking != asking:
                return
            if trainer.awaits == "pull":
                self._begin(trainer)
            elif trainer.awaits and trainer.sent is push is not None:
                self._send(trainer, push)

        return again

    def _greet(self, trainer: Trainer) -> None:
        """A trainer whose gate was lost says who it is, before anything else."""
        if trainer.id in self.strangers:
            self.strangers.discard(trainer.id)
            self.gate.back(trainer.id)
            self._carry_out(self.gate.enter(self.now, trainer.generation, list(self.members)))

    def _again(self, trainer: Trainer, push: Push, generation: int) -> None:
        if trainer.alive and trainer.generation == generation and trainer.sent is push:
            self._send(trainer, push)

    def _die(self, trainer: Trainer, push: Push) -> None:
        trainer.alive = False
        del self.members[trainer.id]
        self._carry_out(self.gate.left(self.now, trainer.id))
        self._give_back(trainer)
        if not self.members:
            self._add()
        self._regroup()
        # Whatever was under way of it comes in much later.
        answers = self.gate.push(self.now, trainer.id, push)
        assert [answer.outcome.kind for answer in answers if isinstance(answer, Answer)] == ["void"]

    def _give_back(self, trainer: Trainer) -> None:
        """As a coordinator that does not know yet all that the gate applied."""
        if trainer.lease is not None and trainer.lease.epoch == self.epoch:
            self.free.add(trainer.lease.start, trainer.lease.stop)
            for start, stop in self.known.get(self.epoch, ()):
                self.free.remove(start, stop)
        trainer.lease = None

    def _go_to_meeting(self, trainer: Trainer, *, rest: bool) -> None:
        trainer.meeting, trainer.awaits = True, ""
        if rest:
            self._greet(trainer)
            self._carry_out(self.gate.rest(self.now, trainer.id), known=True)
        if all(other.meeting for other in self.members.values()):
            self._later(0, self._meet)

    def _meet(self) -> None:
        if not all(other.meeting for other in self.members.values()):
            return
        looked = {}
        for trainer in self.members.values():
            self._greet(trainer)
            decisions = self.gate.pull(self.now, trainer.id, begin=False)
            self._mirror(decisions)
            (answer,) = decisions
            assert isinstance(answer, Answer)
            looked[trainer.id] = answer.outcome.version
        assert set(looked.values()) == {self.version}
        self._hear_records()
        steps = self.rules.get("steps")
        if steps is not None and self.version >= steps:
            self.ended = True
            return
        if not self.free and not self._next_epoch():
            return
        for trainer in list(self.members.values()):
            self._begin(trainer)

    def _hear_records(self) -> None:
        """What the coordinator learns of the gate: nothing of it is handed out any more."""
        records = self.gate.records(self.recorded)
        assert [r.version for r in records] == sorted(r.version for r in records)
        for record in records:
            self.known.setdefault(record.epoch, Intervals()).add(record.start, record.stop)
            self.recorded = record.version
        self.gate.recorded(self.recorded)
        assert not self.gate.records(self.recorded)
        for start, stop in self.known.get(self.epoch, ()):
            self.free.remove(start, stop)

    def _next_epoch(self) -> bool:
        self.epoch += 1
        self.free = Intervals([(0, self.samples)])
        self.ended = self.epoch == self.epochs
        return not self.ended

    # Decisions.

    def _mirror(self, decisions: Sequence[Decision], *, known: bool = False) -> None:
        """Act as `Desk` does: the twin knows of answers with weights before any trainer does."""
        if known or any(isinstance(d, Round) or d.outcome.weights for d in decisions):
            self.mirrored = json.dumps(self.gate.state_dict())

    def _carry_out(self, decisions: list[Decision], *, known: bool = False) -> None:
        self._mirror(decisions, known=known)
        for decision in decisions:
            if isinstance(decision, Round):
                self._check(decision)
            else:
                self._pass_on(decision)

    def _pass_on(self, answer: Answer) -> None:
        """Answers are heard a little later, in any order."""
        trainer = self.members.get(answer.member)
        asking = trainer.asking if trainer is not None else 0
        self._later(self.random.uniform(0, 0.5), lambda: self._hear(answer, asking))

    def _check(self, made: Round) -> None:
        self.version += 1
        assert made.version == self.version, "versions follow each other"
        self.sizes.append(len(made.pushes))
        staleness = self.rules.get("staleness", 0)
        for member, seq in made.pushes:
            push = self.pushes[member, seq]
            age = made.version - 1 - push.based_on
            assert age >= 0
            assert staleness is None or age <= staleness, f"{age} versions old"
            self.ages.append(age)
            assert push.head.generation == self.gate.generation
            held = self.done.setdefault(push.lease.epoch, Intervals())
            assert not held.overlap(push.lease.start, push.lease.stop), "applied twice"
            held.add(push.lease.start, push.lease.stop)

    def _hear(self, answer: Answer, asking: int) -> None:
        trainer = self.members.get(answer.member)
        outcome = answer.outcome
        if trainer is None or not trainer.awaits or trainer.asking != asking:
            return
        self.fates[outcome.kind] = self.fates.get(outcome.kind, 0) + 1
        if outcome.kind in ("late", "refused", "void"):
            self._give_back(trainer)
            self._hear_records()
        trainer.lease, trainer.sent, trainer.awaits = None, None, ""
        assert outcome.weights, f"{outcome.kind} ({outcome.reason}) without weights"
        assert outcome.version <= self.version
        trainer.version = outcome.version
        trainer.share = int(outcome.share)
        trainer.applied += outcome.kind == "applied"
        if outcome.asked:
            self._go_to_meeting(trainer, rest=False)
        else:
            self._compute(trainer)
