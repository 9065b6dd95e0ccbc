"""Random plans of faults."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.chaos import random_plan, read_plan
from echelon.cluster.chaos.plan import PEOPLE
from echelon.cluster.chaos.run import mortal
from echelon.core.config import Job
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
    servers=st.integers(0, 3),
)
def test_every_plan_can_be_read_and_leaves_somebody(
    seed: int, count: int, workers: int, steps: int, servers: int
) -> None:
    plan = random_plan(count, seed, workers=workers, steps=steps, servers=servers)
    assert len(plan) == count
    assert read_plan("; ".join(map(str, plan))) == plan
    assert all(0 <= fault.step <= steps for fault in plan)
    kills = sum(fault.verb == "kill" and fault.target in PEOPLE for fault in plan)
    assert workers + sum(fault.count for fault in plan) - kills >= 2


def test_all_kinds_of_faults_happen() -> None:
    plans = [random_plan(20, seed, workers=4, steps=1000) for seed in range(20)]
    kinds = {f"{fault.verb} {fault.target}" for plan in plans for fault in plan}
    assert len(kinds) == 11


def test_any_server_is_killed_where_there_are_some_to_lose() -> None:
    plans = [random_plan(20, seed, workers=4, steps=1000, servers=3) for seed in range(10)]
    faults = [fault for plan in plans for fault in plan if fault.target == "server"]
    assert {fault.verb for fault in faults} == {"kill"}
    assert {fault.member for fault in faults} == {0, 1, 2}


@pytest.mark.parametrize(
    ("settings", "servers"),
    [
        ({}, 0),
        ({"strategy": "parameter_server", "parameter_server": {"servers": 2}}, 2),
        ({"strategy": "parameter_server", "checkpoint": {"every": "never"}}, 0),
        (
            {
                "strategy": "parameter_server",
                "checkpoint": {"every": "never"},
                "parameter_server": {"replicas": 1},
            },
            1,
        ),
    ],
)
def test_servers_are_lost_only_where_their_state_is_not(
    settings: dict[str, Any], servers: int
) -> None:
    job = Job.model_validate({"task": "mine.py:task", "workers": 2, **settings})
    assert mortal(job) == servers


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match="20 faults are too many for a run of 10 steps"):
        random_plan(20, 0, workers=2, steps=10)
