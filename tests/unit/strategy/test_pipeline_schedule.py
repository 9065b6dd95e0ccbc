"""The simulated schedules of a pipeline."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.config.sections import ScheduleKind
from echelon.strategy.pipeline.schedule import Plan, Step, forward_plan, length, plan

SCHEDULES: list[ScheduleKind] = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


def most_kept(steps: tuple[Step, ...]) -> int:
    """Micro-batches whose forward is remembered at the same time."""
    kept = most = 0
    split = any(step.kind == "weights" for step in steps)
    for step in steps:
        kept += (step.kind == "forward") - (step.kind == ("weights" if split else "backward"))
        most = max(most, kept)
    return most


def short(steps: tuple[Step, ...]) -> str:
    return " ".join(f"{step.kind[0].upper()}{step.micro}" for step in steps)


@given(
    schedule=st.sampled_from(SCHEDULES),
    members=st.integers(1, 6),
    each=st.integers(1, 3),
    micro=st.integers(1, 20),
)
def test_every_step_is_taken_once_and_nobody_waits_for_ever(
    schedule: ScheduleKind, members: int, each: int, micro: int
) -> None:
    stages = members * (each if schedule == "interleaved_1f1b" else 1)
    steps = plan(schedule, members, stages, micro)
    kinds = ("input", "weights") if schedule == "zero_bubble" else ("backward",)
    wanted = {
        Step(kind, stage, at)
        for kind in ("forward", *kinds)
        for stage in range(stages)
        for at in range(micro)
    }
    assert Counter(step for own in steps for step in own) == Counter(wanted)
    assert all(step.stage % members == at for at, own in enumerate(steps) for step in own)
    assert length(steps) >= micro * 3 * (stages // members)  # it can be played to its end


@given(members=st.integers(1, 6), each=st.integers(1, 3), micro=st.integers(1, 20))
def test_looking_at_samples_passes_every_stage_once(members: int, each: int, micro: int) -> None:
    steps = forward_plan(members, members * each, micro)
    assert Counter(step for own in steps for step in own) == Counter(
        Step("forward", stage, at) for stage in range(members * each) for at in range(micro)
    )
    assert length(steps) >= micro * each


def test_one_forward_one_backward_by_turns() -> None:
    first, second = plan("1f1b", 2, 2, 4)
    assert short(first) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert short(second) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_no_more_is_remembered_than_keeps_all_busy(members: int) -> None:
    micro = 4 * members
    assert [most_kept(own) for own in plan("gpipe", members, members, micro)] == [micro] * members
    kept = [most_kept(own) for own in plan("1f1b", members, members, micro)]
    assert kept == list(range(members, 0, -1))
    assert max(most_kept(own) for own in plan("zero_bubble", members, members, micro)) <= members


@pytest.mark.parametrize("members", [2, 4])
def test_schedules_lose_as_little_time_at_the_ends_as_they_promise(members: int) -> None:
    micro = 4 * members
    idle = members - 1  # units of (forward + backward = 3) that the first stage waits

    def lost(steps: Plan, each: int = 1) -> float:
        return (length(steps) - 3 * micro * each) / each

    assert lost(plan("gpipe", members, members, micro)) == 3 * idle
    assert lost(plan("1f1b", members, members, micro)) == 3 * idle
    interleaved = plan("interleaved_1f1b", members, 2 * members, micro)
    assert lost(interleaved, each=2) == 3 * idle / 2
    assert lost(plan("zero_bubble", members, members, micro)) == idle
