"""What a run measures and when it ends: meter, limits, early stopping."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.core.config import job_from
from echelon.core.errors import PeerError
from echelon.core.types import Update
from echelon.loop.run import Evaluation, Limits, Meter, Run
from echelon.optim import EarlyStop


def done(loss_sum: float, weight: float) -> Update:
    return Update(True, 1, loss_sum, weight)


def test_the_meter_divides_sums_by_weights_once() -> None:
    meter = Meter(samples=100)
    meter.add(done(8.0, 4), 4)
    meter.add(done(3.0, 1), 1)
    assert meter.peek()["loss"] == pytest.approx(11 / 5)
    assert meter.read()["loss"] == pytest.approx(11 / 5)
    assert meter.samples == 105
    meter.add(done(6.0, 2), 2)
    assert meter.read()["loss"] == pytest.approx(3.0), "a reading begins a new window"
    assert meter.read()["loss"] == pytest.approx(3.0), "an empty window shows the last one"


def test_the_meter_adds_up_long_windows_without_loss() -> None:
    meter = Meter()
    for _ in range(1000):
        meter.add(done(0.5, 1), 1)
    assert meter.read()["loss"] == 0.5


def test_the_meter_tells_speed() -> None:
    meter = Meter()
    time.sleep(0.05)
    meter.add(done(1, 1), 10)
    values = meter.read()
    assert 0 < values["steps_per_s"] <= 20
    assert values["samples_per_s"] == pytest.approx(10 * values["steps_per_s"])


def test_limits() -> None:
    limits = Limits.of(job_from({"epochs": 3, "steps": 50, "minutes": 1.0}))
    assert limits.total_steps(101, 10) == 33
    assert Limits.of(job_from({"minutes": 1.0})).total_steps(101, 10) is None
    assert Limits.of(job_from({"epochs": 9, "steps": 50})).total_steps(101, 10) == 50
    assert limits.reached(49) is None
    assert limits.reached(50) == "50 steps done"
    assert not limits.late(59.0)
    assert limits.late(60.0)
    assert not Limits.of(job_from({"epochs": 9})).late(1e9)


def test_early_stopping_hears_of_an_evaluation_once_though_another_member_is_lost() -> None:
    """The strategy tells the servers, and cannot; after members have met, it is done already."""
    told: list[float] = []

    def observe(value: float) -> None:
        told.append(value)
        raise PeerError("server 0 is lost")

    early = EarlyStop("max", patience=1)
    run: Any = SimpleNamespace(
        valid=object(),
        version=7,
        job=job_from({"stop": {"metric": "accuracy"}, "checkpoint": {"best": False}}),
        early=early,
        observer=SimpleNamespace(evaluated=lambda *_: None),
        strategy=SimpleNamespace(observe=observe),
        _evaluated_at=-1,
        _best_at=-1,
        _look=lambda: Evaluation({"loss": 0.5, "accuracy": 0.9}, {}, 10),
    )
    with pytest.raises(PeerError, match="server 0 is lost"):
        Run.evaluate(run)
    Run.evaluate(run)
    assert (early.best, run._best_at, early.should_stop) == (0.9, 7, None)
    assert told == [-0.9], "the schedule watches stop.metric, and minimizes"
