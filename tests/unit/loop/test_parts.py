from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from echelon.core.config import HealthSection, job_from
from echelon.core.errors import PeerError
from echelon.core.types import Lease, Update
from echelon.loop.build import LayerHealth
from echelon.loop.interrupt import on_interrupt
from echelon.loop.run import Evaluation, Limits, Meter, Run
from echelon.loop.train import told_ahead
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


def test_a_vanishing_and_an_exploding_layer_are_named_once() -> None:
    said: list[str] = []
    health = LayerHealth(
        HealthSection(every=10, vanishing=1e-6, exploding=100.0),
        lambda _step, message: said.append(message),
    )
    assert health.due(20)
    assert not health.due(21)
    weights = {name: torch.ones(4) for name in ("a", "b", "c")}
    grads = {"a": torch.ones(4), "b": torch.full((4,), 1e-9), "c": torch.full((4,), 1e4)}
    health.inspect(10, weights, grads)
    assert [line.split(":")[0] for line in said] == [
        "layer 'b' is vanishing",
        "layer 'c' is exploding",
    ]
    health.inspect(20, weights, grads)
    assert len(said) == 2, "told once"
    health.inspect(30, weights, dict.fromkeys(grads, torch.ones(4)))
    health.inspect(40, weights, grads)
    assert len(said) == 4, "told again after it had recovered"


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with on_interrupt(lambda _name: None):
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [before]


class _Foreseeing:
    """A strategy that hears of batches to come."""

    remote = True

    def __init__(self, *, foresees: bool) -> None:
        self.foresees = foresees
        self.heard: list[object] = []

    def expect(self, micro: object) -> None:
        self.heard.append(micro)


@pytest.mark.parametrize("foresees", [True, False])
def test_the_next_batch_is_told_before_one_is_handed_out(foresees: bool) -> None:
    strategy = _Foreseeing(foresees=foresees)
    batches: list[Any] = [(Lease(0, at, at + 1), [at]) for at in range(3)]
    seen = []
    for lease, micro in told_ahead(cast(Any, strategy), iter(batches)):
        seen.append((lease, micro))
        assert strategy.heard == ([[1], [2], ()][: len(seen)] if foresees else [])
    assert seen == batches


def test_early_stopping_hears_of_an_evaluation_once_though_another_member_is_lost() -> None:
    """The strategy tells the servers, and cannot; after members have met, it is done already."""
    told: list[float] = []

    def observe(loss: float) -> None:
        told.append(loss)
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
    assert (early.best, run._best_at, early.should_stop, told) == (0.9, 7, None, [0.5])
