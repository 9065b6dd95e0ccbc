"""What several members leave behind is what one process would: models, random numbers, words."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import Task, cross_entropy
from echelon.cluster import start
from echelon.cluster.health import MemberFailed
from echelon.core.errors import DataError, TaskError
from echelon.track import Store

pytestmark = pytest.mark.timeout(300)

TWO: dict[str, Any] = {"strategy": "all_reduce", "workers": 2}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))


def task(**changes: Any) -> Task:
    x = torch.randn(101, 4, generator=torch.Generator().manual_seed(1))
    data = {"x": x, "y": (x.sum(1) > 0).long()}
    parts: dict[str, Any] = {"model": model, "loss": cross_entropy, "train": data}
    return Task(**parts | changes)


def train(given: Task, **settings: Any) -> echelon.Result:
    common: dict[str, Any] = {"batch_size": 10, "threads": 1, "track": {"report": False}}
    return echelon.train(given, quiet=True, **common | settings)


def weights(result: echelon.Result) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])


@pytest.mark.parametrize(
    "way",
    [TWO, {"strategy": "pipeline", "mesh": {"data": 2, "pipeline": 2}}],
    ids=["all_reduce", "pipeline"],
)
def test_members_draw_on_after_a_resume_as_if_nothing_had_been(way: dict[str, Any]) -> None:
    whole = train(task(), epochs=2, **way)
    part = train(task(), steps=7, **way)  # in the middle of an epoch
    rest = train(task(), resume=part.run, epochs=2, steps=None, **way)
    assert rest.steps == whole.steps == 22
    assert torch.equal(weights(rest), weights(whole))


def test_a_resumed_run_may_have_more_members_than_it_began_with() -> None:
    part = train(task(), steps=7, **TWO)
    rest = train(task(), resume=part.run, steps=9, strategy="all_reduce", workers=3)
    assert rest.steps == 9


def test_a_ready_model_comes_back_as_it_came_and_ready_for_use() -> None:
    ready = model()
    result = train(task(model=ready), recompute=True, epochs=1, **TWO)
    assert result.model is ready
    assert not ready.training, "as after a run of one process"
    assert all("forward" not in vars(module) for module in ready.modules())


def test_what_cannot_begin_leaves_nothing_open() -> None:
    """Even where there is a group already; conftest looks for its sockets."""
    with pytest.raises(TaskError, match="no training samples"):
        train(task(train=None), strategy="all_reduce", workers=1)


class Failing:
    """A forward pass that fails in one member, at its eighth call."""

    def __init__(self, member: int, error: Exception) -> None:
        self._member, self._error, self._calls = member, error, 0

    def __call__(self, network: nn.Module, batch: dict[str, Any]) -> Tensor:
        self._calls += 1
        if self._calls == 8 and (torch.initial_seed() != 0) == bool(self._member):
            raise self._error
        found: Tensor = network(batch["x"])
        return found


@pytest.mark.parametrize("member", [0, 1])
def test_a_bug_is_told_once_and_its_traceback_kept(
    capfd: pytest.CaptureFixture[str], member: int
) -> None:
    with pytest.raises(MemberFailed) as caught:
        train(task(forward=Failing(member, ZeroDivisionError("eight"))), epochs=3, **TWO)
    run = Store("runs").run("last")
    (event,) = Store("runs").events(run.id)
    assert event.message == run.summary["error"] == str(caught.value)
    assert f"member {member} of 2" in event.message
    assert (run.status, run.summary["steps"], event.step) == ("failed", 7, 7)
    assert "ZeroDivisionError: eight" in (run.folder / "error.txt").read_text()
    assert "eight" not in capfd.readouterr().err, "whoever called is told, in the error"


def test_an_error_that_was_meant_is_told_once() -> None:
    with pytest.raises(DataError, match="row 8"):
        train(task(forward=Failing(0, DataError("row 8"))), epochs=3, **TWO)
    run = Store("runs").run("last")
    assert [event.message for event in Store("runs").events(run.id)] == ["row 8"]
    assert run.status == "failed"
    assert not (run.folder / "error.txt").exists()


def test_members_need_not_import_their_strategy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched(Exception):
        pass

    def launch(*_: object, **__: object) -> None:
        raise Launched(*[name for name in sys.modules if name.startswith("echelon.strategy.")])

    monkeypatch.delitem(sys.modules, "echelon.strategy.all_reduce", raising=False)
    monkeypatch.setattr(start, "launch_elastic", launch)
    with pytest.raises(Launched) as caught:
        train(task(), **TWO)
    assert "echelon.strategy.all_reduce" in caught.value.args
