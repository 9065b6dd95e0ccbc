"""Early stopping knows what is better, waits, and says why it stops."""

from __future__ import annotations

import json
import math
from typing import Literal

import pytest

from echelon.core.errors import CheckpointError
from echelon.optim import EarlyStop, stop_mode


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("loss", "min"),
        ("top1_error", "min"),
        ("RMSE", "min"),
        ("mse", "min"),
        ("valid_mae", "min"),
        ("perplexity", "min"),
        ("accuracy", "max"),
        ("auc", "max"),
        ("macro_f1", "max"),
        ("r2", "max"),
    ],
)
def test_auto_mode_goes_by_the_metrics_name(metric: str, expected: str) -> None:
    assert stop_mode("auto", metric) == expected


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_given_mode_is_kept(mode: Literal["min", "max"]) -> None:
    assert stop_mode(mode, "loss") == mode


def test_smaller_is_better_for_a_loss_and_larger_for_a_score() -> None:
    loss, score = EarlyStop("min"), EarlyStop("max")
    assert [loss.observe(value) for value in (1.0, 0.5, 0.5, 0.7, 0.4)] == [
        *(True, True, False, False, True)
    ]
    assert [score.observe(value) for value in (0.5, 0.6, 0.6, 0.4)] == [True, True, False, False]
    assert (loss.best, score.best) == (0.4, 0.6)
    assert loss.should_stop is None, "without patience it never stops"


def test_an_improvement_must_be_larger_than_min_delta() -> None:
    stop = EarlyStop("max", min_delta=0.25)
    assert [stop.observe(value) for value in (0.5, 0.75, 0.76)] == [True, False, True]


def test_it_stops_when_patience_runs_out_and_says_so() -> None:
    stop = EarlyStop("min", patience=2)
    for value in (1.0, 2.0, 0.5, 0.6):
        stop.observe(value)
        assert stop.should_stop is None
    stop.observe(0.7)
    assert stop.should_stop == "no improvement in 2 evaluations (best 0.5)"


def test_nan_is_never_better() -> None:
    stop = EarlyStop("max", patience=2)
    assert [stop.observe(math.nan), stop.observe(math.nan)] == [False, False]
    assert stop.should_stop == "no improvement in 2 evaluations (no finite value)"


@pytest.mark.parametrize(("mode", "values"), [("max", (0.8, 0.9)), ("min", (-0.8, -0.9))])
def test_it_stops_at_the_target_and_stays_stopped(
    mode: Literal["min", "max"], values: tuple[float, float]
) -> None:
    stop = EarlyStop(mode, target=values[1])
    stop.observe(values[0])
    assert stop.should_stop is None
    stop.observe(values[1])
    assert stop.should_stop == f"target reached: {values[1]} (target {values[1]})"
    stop.observe(values[0])
    assert stop.should_stop is not None


def test_it_goes_on_where_it_was_saved() -> None:
    first, second = EarlyStop("min", patience=2), EarlyStop("min", patience=2)
    first.observe(1.0)
    first.observe(1.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.observe(1.2) is False
    assert second.should_stop == "no improvement in 2 evaluations (best 1)"


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot go on"):
        EarlyStop("min").load_state_dict({"best": 1.0})
