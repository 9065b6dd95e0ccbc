"""Plans made by chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.chaos import random_plan, read_plan
from echelon.core.errors import UserError


def test_the_same_seed_makes_the_same_plan_and_another_one_does_not() -> None:
    plan = random_plan(20, 7, workers=4, steps=1000)
    assert plan == random_plan(20, 7, workers=4, steps=1000)
    assert plan != random_plan(20, 8, workers=4, steps=1000)


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    workers=st.integers(2, 8),
    steps=st.integers(40, 10**6),
)
def test_every_plan_can_be_read_and_leaves_somebody(
    seed: int, count: int, workers: int, steps: int
) -> None:
    plan = random_plan(count, seed, workers=workers, steps=steps)
    assert len(plan) == count
    assert read_plan("; ".join(map(str, plan))) == plan
    assert all(0 <= fault.step <= steps for fault in plan)
    kills = sum(fault.verb == "kill" and fault.target != "coordinator" for fault in plan)
    assert workers + sum(fault.count for fault in plan) - kills >= 2


def test_all_kinds_of_faults_happen() -> None:
    plans = [random_plan(20, seed, workers=4, steps=1000) for seed in range(20)]
    kinds = {f"{fault.verb} {fault.target}" for plan in plans for fault in plan}
    assert len(kinds) == 11


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match="20 faults are too many for a run of 10 steps"):
        random_plan(20, 0, workers=2, steps=10)
