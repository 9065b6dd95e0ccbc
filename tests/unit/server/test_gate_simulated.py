"""Simulated runs: no push gets too old, no sample counts twice, and every wait ends."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.server.simulation import World

DIALS = [
    {"staleness": None, "quorum": 1},
    {"staleness": 0, "quorum": 1},
    {"staleness": 1, "quorum": 1},
    {"staleness": 4, "quorum": 1},
    {"staleness": 0, "quorum": 2},
    {"staleness": 2, "quorum": 3},
    {"staleness": None, "quorum": 2},
]


def applied_once(world: World) -> bool:
    return all(
        list(world.done.get(epoch, ())) == [(0, world.samples)] for epoch in range(world.epochs)
    )


@settings(max_examples=60)
@given(
    st.sampled_from(DIALS),
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([(), (5,), (3, 7)]),
)
def test_every_sample_is_applied_once_and_none_too_late(
    dial: dict[str, Any], trainers: int, seed: int, trouble: float, due: tuple[int, ...]
) -> None:
    world = World({**dial, "due": list(due)}, trainers, Random(seed), trouble=trouble)
    world.run()
    assert applied_once(world)
    assert max(world.sizes) <= dial["quorum"]


@settings(max_examples=40)
@given(st.sampled_from(DIALS), st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 20))
def test_the_last_step_is_the_last(
    dial: dict[str, Any], trainers: int, seed: int, steps: int
) -> None:
    world = World({**dial, "steps": steps}, trainers, Random(seed), epochs=50)
    world.run()
    assert world.version == steps


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_fast_are_held_back_only_as_far_as_they_must(staleness: int) -> None:
    world = World({"staleness": staleness, "quorum": 1, "balance": False}, 4, Random(3))
    for at, trainer in enumerate(world.members.values()):
        trainer.speed = 20.0 if at == 0 else 1.0
    world.run()
    assert max(world.ages) == staleness
    assert set(world.fates) == {"applied", "pulled"}, "with one push an update nothing is lost"


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_gate_that_takes_over_makes_nobody_late(staleness: int) -> None:
    world = World({"staleness": staleness, "quorum": 1, "due": [7]}, 4, Random(staleness))
    world.trouble, world.troubles = 0.3, ("gate",)
    world.run()
    assert applied_once(world)
    assert set(world.fates) - {"done"} == {"applied", "pulled"}


def with_a_slow_one(staleness: int | None, *, balance: bool) -> World:
    rules = {"staleness": staleness, "quorum": 1, "balance": balance, "batch": 20}
    world = World(rules, 4, Random(3), samples=3000, epochs=1)
    for at, trainer in enumerate(world.members.values()):
        trainer.speed = 4.0 if at == 0 else 1.0
    world.run()
    assert applied_once(world)
    return world


@pytest.mark.parametrize("staleness", [4, None])
def test_with_shares_by_speed_all_push_at_the_same_pace(staleness: int | None) -> None:
    world = with_a_slow_one(staleness, balance=True)
    pushes = [trainer.applied for trainer in world.members.values()]
    assert max(pushes) / min(pushes) < 1.6


def test_with_shares_by_speed_nobody_waits_for_a_slow_one() -> None:
    shared, whole = (with_a_slow_one(4, balance=balance) for balance in (True, False))
    assert shared.now < 0.75 * whole.now


def test_asynchronous_shares_by_speed_keep_the_gradients_of_a_slow_one_fresh() -> None:
    shared, whole = (with_a_slow_one(None, balance=balance) for balance in (True, False))
    assert mean(shared.ages) <= mean(whole.ages)
    assert max(shared.ages[100:]) < 0.75 * max(whole.ages[100:]), "once speeds are known"


def test_backup_workers_do_not_wait_for_the_slow() -> None:
    world = World({"staleness": 0, "quorum": 3, "due": []}, 4, Random(5), samples=600, epochs=1)
    for at, trainer in enumerate(world.members.values()):
        trainer.speed = 50.0 if at == 0 else 1.0
    world.run()
    assert applied_once(world)
    assert world.fates["late"] > 0
    full = [size for size in world.sizes if size == 3]
    assert len(full) > 0.8 * len(world.sizes)
