"""Schedules at points that can be worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
import torch

from echelon.core.config import ScheduleSection
from echelon.core.errors import CheckpointError, ConfigError
from echelon.core.interfaces import Schedule
from echelon.optim import build_schedule


def schedule(name: str, total: int | None = None, **values: Any) -> Schedule:
    return build_schedule(ScheduleSection.model_validate({"name": name, **values}), total)


@pytest.mark.parametrize(
    ("made", "points"),
    [
        (schedule("constant"), {0: 1.0, 10**9: 1.0}),
        (schedule("constant", warmup=4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        (schedule("step", every=10), {0: 1.0, 9: 1.0, 10: 0.1, 19: 0.1, 20: 0.01}),
        (schedule("step", every=10, factor=0.5, floor=0.3), {10: 0.5, 20: 0.3, 500: 0.3}),
        (schedule("step", every=10, warmup=5), {0: 0.2, 5: 1.0, 14: 1.0, 15: 0.1}),
        (schedule("linear", 100), {0: 1.0, 50: 0.5, 99: 0.01, 100: 0.0, 200: 0.0}),
        (schedule("linear", 100, floor=0.2), {0: 1.0, 50: 0.6, 100: 0.2, 200: 0.2}),
        (schedule("linear", 100, steps=10), {5: 0.5, 10: 0.0}),
        (schedule("linear", 110, warmup=10), {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.5, 110: 0.0}),
        (schedule("cosine", 100), {0: 1.0, 50: 0.5, 100: 0.0, 300: 0.0}),
        (schedule("cosine", 100), {25: (1 + math.cos(math.pi / 4)) / 2}),
        (schedule("cosine", 100, floor=0.5), {0: 1.0, 50: 0.75, 100: 0.5}),
        (schedule("cosine", 30, warmup=10), {0: 0.1, 10: 1.0, 20: 0.5, 30: 0.0}),
        (schedule("plateau", warmup=2), {0: 0.5, 1: 1.0, 9: 1.0}),
    ],
)
def test_factors_at_known_points(made: Schedule, points: dict[int, float]) -> None:
    for version, factor in points.items():
        assert made.factor(version) == pytest.approx(factor, abs=1e-12), f"at version {version}"


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "plateau"])
def test_no_update_of_a_run_is_made_at_rate_zero(name: str) -> None:
    made = schedule(name, 50, warmup=7)
    assert all(made.factor(version) > 0 for version in range(50))


def test_a_trial_run_may_end_within_its_warm_up() -> None:
    assert schedule("cosine", 3, warmup=10).factor(2) == pytest.approx(0.3)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_falls_where_torchs_falls(patience: int, mode: Literal["min", "max"]) -> None:
    made = schedule("plateau", factor=0.5, patience=patience)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    peer = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.5, patience)
    values = [1.0, 0.9, 0.9, 0.95, 0.89999, 0.8, 0.8, 0.8, 0.8, 0.8, 0.81, 0.7, 0.9, 0.9, 1.1]
    values += [1.10001, 1.2, 0.1, 0.1, 0.1, 0.099999, 0.09, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    for i, value in enumerate(values):
        made.observe(value if mode == "min" else -value)
        peer.step(value)
        assert made.factor(100) == optimizer.param_groups[0]["lr"], f"after value {i}"
    assert made.factor(100) < 1


def test_a_result_that_is_not_finite_is_no_improvement_to_plateau() -> None:
    made = schedule("plateau", factor=0.5, patience=0)
    made.observe(math.inf)
    assert made.state_dict() == {"level": 0.5, "best": None, "waited": 0}


def test_plateau_does_not_fall_below_its_floor() -> None:
    made = schedule("plateau", factor=0.1, patience=0, floor=0.05)
    for _ in range(5):
        made.observe(1.0)
    assert made.factor(0) == 0.05


def test_plateau_goes_on_where_it_was_saved() -> None:
    straight, first, second = (schedule("plateau", patience=1) for _ in range(3))
    values = [1.0, 2.0, 3.0, 0.5, 0.6, 0.7]
    for value in values[:2]:
        first.observe(value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values:
        straight.observe(value)
    for value in values[2:]:
        second.observe(value)
    assert second.state_dict() == straight.state_dict()
    assert second.factor(9) == straight.factor(9) == pytest.approx(0.01)


def test_the_other_schedules_take_no_notice_and_have_no_state() -> None:
    made = schedule("cosine", 100)
    made.observe(5.0)
    assert made.state_dict() == {}
    made.load_state_dict({})
    assert made.factor(50) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_schedule_must_know_where_it_ends(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must know where it ends") as caught:
        schedule(name)
    assert caught.value.path == ("schedule", "steps")


def test_warm_up_must_be_over_before_the_schedule_is() -> None:
    with pytest.raises(ConfigError, match=r"warmup = 10: must be less than schedule.steps \(10\)"):
        schedule("linear", 100, warmup=10, steps=10)


def test_state_of_another_schedule_is_refused() -> None:
    plateau, constant = schedule("plateau"), schedule("constant")
    with pytest.raises(CheckpointError, match=r"has state \(best, level, waited\)"):
        constant.load_state_dict(plateau.state_dict())
    with pytest.raises(CheckpointError, match="not a plateau"):
        plateau.load_state_dict(constant.state_dict())
    with pytest.raises(CheckpointError, match="not a plateau"):
        plateau.load_state_dict({"level": "1", "best": None, "waited": 0})
