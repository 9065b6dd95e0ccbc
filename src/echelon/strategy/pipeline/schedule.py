"""In which order each member takes its steps, and how a batch is cut into micro-batches.

Every member simulates the whole pipeline, with all members' steps in units of time, and keeps its
own steps. An order that was possible in the simulation is possible at any speed: each step only
waits for steps that came before it, so there is no deadlock.

    1f1b, 2 stages, 4 micro-batches (F forward, B backward):
    member 0   F0 F1 . . B0 B0 F2 B1 B1 F3 …
    member 1   .  F0 B0 B0 F1 B1 B1 F2 …

`interleaved_1f1b` gives every member several stages, so that a micro-batch passes it more often and
less time is lost at both ends. `zero_bubble` divides backward in two: other members only wait for
the gradient of the input; that of the weights fills the gaps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from echelon.core.config.sections import ScheduleKind
from echelon.core.types import Batch
from echelon.data import batch as batches

Kind = Literal["forward", "backward", "input", "weights"]
_TIME: dict[Kind, int] = {"forward": 1, "backward": 2, "input": 1, "weights": 1}


class Step(NamedTuple):
    """One micro-batch in one stage. `backward` is `input` and `weights` in one."""

    kind: Kind
    stage: int
    micro: int


Plan = tuple[tuple[Step, ...], ...]
"""The steps of each member."""


@functools.lru_cache(maxsize=64)
def plan(schedule: ScheduleKind, members: int, stages: int, micro: int) -> Plan:
    """Plan forward and backward of `micro` micro-batches; stage s is at member s modulo members."""
    return _Play(schedule, members, stages, micro).played()


@functools.lru_cache(maxsize=64)
def forward_plan(members: int, stages: int, micro: int) -> Plan:
    """Plan forward only, for evaluation."""
    return tuple(
        tuple(Step("forward", *at) for at in _forward_order(member, members, stages, micro))
        for member in range(members)
    )


class _Play:
    """A simulation of the pipeline."""

    def __init__(self, schedule: ScheduleKind, members: int, stages: int, micro: int) -> None:
        self.gpipe, self.cut = schedule == "gpipe", schedule == "zero_bubble"
        self.last, self.total = stages - 1, stages * micro
        self.members = [_Member(self, at, members, stages, micro) for at in range(members)]
        self.finished: dict[Step, int] = {}
        self.now = self.slack = 0

    def played(self) -> Plan:
        while any(not member.is_done for member in self.members):
            chosen = [member.move() for member in self.members if member.free_at <= self.now]
            idle = all(member.free_at <= self.now for member in self.members)
            if idle and not any(chosen):
                self.slack += 1  # the limits block all members: allow each one more micro-batch
                continue
            self.now += 1
        return tuple(tuple(member.steps) for member in self.members)

    def possible(self, step: Step) -> bool:
        awaited = _awaited(step, self.last)
        return all(self.finished.get(other, math.inf) <= self.now for other in awaited)


class _Member:
    """A simulated member: the steps that it has taken, and those that are left."""

    def __init__(self, play: _Play, at: int, members: int, stages: int, micro: int) -> None:
        self.play, self.steps, self.free_at = play, list[Step](), 0
        own = range(at, stages, members)
        self.forwards = list(_forward_order(at, members, stages, micro))
        # Backward takes the same way back: through the last of the own stages first.
        back = {stage: own[-1 - place] for place, stage in enumerate(own)}
        self.backwards = [(back[stage], number) for stage, number in self.forwards]
        self.weights: list[tuple[int, int]] = []
        self.under_way = self.kept = 0
        rest = members - at
        self.most = rest if len(own) == 1 else 2 * (rest - 1) + (len(own) - 1) * members + 1
        self.most_kept = members * len(own)

    @property
    def is_done(self) -> bool:
        return not (self.forwards or self.backwards or self.weights)

    def move(self) -> bool:
        """Begin a step if one is possible now; return whether there was one."""
        step = self._forward() or self._backward() or self._weights()
        if step is None:
            return False
        self.steps.append(step)
        self.free_at = self.play.now + _TIME[step.kind]
        self.play.finished[_noted(step)] = self.free_at
        return True

    def _backward(self) -> Step | None:
        if not self.backwards or (self.play.gpipe and self.forwards):
            return None
        step = Step("input" if self.play.cut else "backward", *self.backwards[0])
        if not self.play.possible(step):
            return None
        done = self.backwards.pop(0)
        self.under_way -= 1
        if self.play.cut:
            self.weights.append(done)
        else:
            self.kept -= 1
        return step

    def _forward(self) -> Step | None:
        if not self.forwards or not self._has_room():
            return None
        step = Step("forward", *self.forwards[0])
        if not self.play.possible(step):
            return None
        self.forwards.pop(0)
        self.under_way += 1
        self.kept += 1
        return step

    def _has_room(self) -> bool:
        """Return whether one more micro-batch may begin.

        All that are under way are kept in memory, so there are no more than keep all members busy.
        """
        if self.play.gpipe:
            return True
        slack = self.play.slack
        return self.under_way < self.most + slack and self.kept < self.most_kept + slack

    def _weights(self) -> Step | None:
        if not self.weights:
            return None
        self.kept -= 1
        return Step("weights", *self.weights.pop(0))


def _awaited(step: Step, last: int) -> list[Step]:
    """Return the steps that have to be finished before; `backward` counts as `input`."""
    kind, stage, micro = step
    if kind == "forward":
        return [Step("forward", stage - 1, micro)] if stage else []
    if kind == "weights":
        return [Step("input", stage, micro)]
    after = [Step("input", stage + 1, micro)] if stage < last else []
    return [Step("forward", stage, micro), *after]


def _noted(step: Step) -> Step:
    return Step("input", *step[1:]) if step.kind == "backward" else step


def _forward_order(member: int, members: int, stages: int, micro: int) -> Iterator[tuple[int, int]]:
    """Yield (stage, micro-batch): as many micro-batches as members through each stage in turn."""
    for start in range(0, micro, members):
        for stage in range(member, stages, members):
            for at in range(start, min(start + members, micro)):
                yield stage, at


def length(steps: Plan) -> int:
    """Return the simulated time of a plan, to compare plans."""
    done: dict[Step, int] = {}
    clocks, at = [0] * len(steps), [0] * len(steps)
    last = max(step.stage for own in steps for step in own)
    while any(at[member] < len(own) for member, own in enumerate(steps)):
        for member, own in enumerate(steps):
            while at[member] < len(own):
                step = own[at[member]]
                before = [done.get(other) for other in _awaited(step, last)]
                if None in before:
                    break
                clocks[member] = max([clocks[member], *filter(None, before)]) + _TIME[step.kind]
                done[_noted(step)] = clocks[member]
                at[member] += 1
    return max(clocks)


# Cutting a batch into micro-batches


PER_MEMBER = 4
"""Micro-batches per member, unless the job says how many: a fifth of the time is then lost while
the pipeline fills and empties."""
_SMALLEST = 2
"""Samples of a micro-batch at least: batch norm needs two."""
_UNKNOWN = 32
"""Samples of a micro-batch if the batch size is unknown."""


def how_many(size: int, members: int, wanted: int | None) -> int:
    """Return the number of micro-batches: as many as wanted, but no more than there are samples."""
    if wanted is None:
        wanted = 1 if members == 1 else min(PER_MEMBER * members, size // _SMALLEST)
    return max(1, min(wanted, size))


def usual(
    batch: int | None, replicas: int, accumulate: int, members: int, wanted: int | None
) -> int:
    """Return the usual number of samples in a micro-batch, at least as many as batch norm needs."""
    if batch is None:
        return _UNKNOWN
    share = batch // (replicas * accumulate)
    return max(_SMALLEST, share // how_many(share, members, wanted))


def pieces(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into `count` micro-batches whose sizes differ by at most one sample."""
    if count == 1:
        return [batch]
    size = batches.size(batch)
    edges = [size * at // count for at in range(count + 1)]
    return batches.split(batch, [stop - start for start, stop in pairwise(edges)])
