"""Plans of faults are parsed, and errors in them are explained."""

from __future__ import annotations

import pytest

from echelon.cluster.chaos.plan import Fault, PlanError, random_plan, read_plan
from echelon.core.errors import UserError

PLAN = (
    "kill trainer:1@step=50; freeze trainer:2@step=80 for 5s; kill coordinator@step=120; "
    "join 1@step=150; slow leader@step=160 by 4x for 2s; partition trainer:0@step=170+0.5s for 1s; "
    "fill disk@step=180 for 1s; tear checkpoint@step=190; kill server:0@step=195"
)


def test_a_plan_says_what_happens_to_whom_and_when() -> None:
    faults = read_plan(PLAN)
    assert faults[0] == Fault("kill", "trainer", 1, 50)
    assert faults[1] == Fault("freeze", "trainer", 2, 80, seconds=5.0)
    assert (faults[3].verb, faults[3].count, faults[3].step) == ("join", 1, 150)
    assert (faults[4].target, faults[4].factor, faults[4].seconds) == ("leader", 4.0, 2.0)
    assert faults[5].delay == 0.5
    assert faults[-1] == Fault("kill", "server", 0, 195)


def test_what_a_fault_is_called_can_be_read_again() -> None:
    faults = read_plan(PLAN)
    assert read_plan("; ".join(map(str, faults))) == faults


def test_faults_come_in_the_order_of_their_steps() -> None:
    assert [f.step for f in read_plan("kill trainer@step=9; join 1@step=3")] == [3, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("kill trainer:1", "says not when"),
        ("kil trainer:1@step=5", "did you mean 'kill'"),
        ("kill disk@step=5", "choices: coordinator, leader, server, trainer"),
        ("freeze server:0@step=5 for 1s", "choices: coordinator, leader, trainer"),
        ("kill leader:1@step=5", "is nobody"),
        ("kill trainer@5", "is no moment"),
        ("join many@step=5", "a number from 1 to 64"),
        ("freeze trainer@step=5", "for"),
        ("slow trainer@step=5 for 2s", "by"),
    ],
)
def test_a_plan_that_cannot_be_understood_is_refused_with_its_place(
    text: str, message: str
) -> None:
    with pytest.raises(PlanError, match=r"^plan, character \d+: ") as refused:
        read_plan(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_place_of_a_mistake_is_that_of_its_fault() -> None:
    with pytest.raises(PlanError, match="character 22: "):
        read_plan("kill trainer@step=5; kil trainer@step=6")


def test_the_same_seed_makes_the_same_plan_and_another_one_another() -> None:
    first = random_plan(20, 7, workers=4, steps=1000)
    assert first == random_plan(20, 7, workers=4, steps=1000)
    assert first != random_plan(20, 8, workers=4, steps=1000)
    assert len(first) == 20
    assert [f.step for f in first] == sorted(f.step for f in first)


def test_random_plans_leave_somebody_to_train() -> None:
    for seed in range(50):
        trainers = 3
        for fault in random_plan(30, seed, workers=3, steps=1000):
            trainers += fault.count
            trainers -= fault.verb == "kill" and fault.target != "coordinator"
            assert trainers >= 1, (seed, fault)


def test_more_faults_than_steps_are_refused() -> None:
    with pytest.raises(UserError, match="20 faults are too many for a run of 10 steps"):
        random_plan(20, 0, workers=2, steps=10)
