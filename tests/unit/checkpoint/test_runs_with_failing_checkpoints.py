"""Complete runs whose checkpoints cannot be written, or that end with an error."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import Task, train
from echelon.checkpoint import Shelf
from echelon.core.errors import CheckpointError

BATCH, ROWS = 8, 80
LIMIT = 1 << 17
"""Bytes a file may have while the disk is full: less than a checkpoint of the model below."""


class Trouble(Exception):
    """An error in the user's model."""


class Model(nn.Module):
    def __init__(self, broken_at: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.hidden = nn.Linear(16, 4096)
        self.out = nn.Linear(4096, 1)
        self.broken_at, self.passes = broken_at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        moved = self.norm(x)
        if self.passes == self.broken_at:
            raise Trouble(f"pass {self.passes}")
        found: Tensor = self.out(self.hidden(moved).relu())
        return found


def squared(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    return (output - batch["y"]).square().sum(), len(output)


def task(broken_at: int = 0) -> Task:
    torch.manual_seed(3)
    x = torch.randn(ROWS, 16)
    return Task(
        lambda: Model(broken_at), squared, train={"x": x, "y": x.sum(1, keepdim=True)}, name="t"
    )


class Disk:
    """An observer that fills the disk and frees it at the first notice or at the end.

    It fills the disk once the checkpoint of step `after` is complete; at once if `after` is 0.
    """

    def __init__(self, after: int, *, frees: bool = False) -> None:
        self._after, self._frees = after, frees
        self.told: list[str] = []

    def logged(self, step: int, _values: Mapping[str, float]) -> None:
        if step == self._after + 1:
            deadline = time.monotonic() + 60
            while self._after and self._after not in shelf().versions():
                assert time.monotonic() < deadline, "it was never written"
                time.sleep(0.005)
            self._limit(LIMIT)

    def noticed(self, _step: int, message: str) -> None:
        self.told.append(message)
        if self._frees:
            self._limit(resource.RLIM_INFINITY)

    def finished(self, _status: str, _summary: Mapping[str, Any]) -> None:
        self._limit(resource.RLIM_INFINITY)

    def started(self, run: str, facts: Mapping[str, Any]) -> None: ...
    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...
    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def _limit(self, size: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def go(broken_at: int = 0, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "optimizer": {"name": "adam"},
        "track": {"every": 1, "report": False},
        "epochs": 1,
    }
    return train(task(broken_at), **(settings | options))


def shelf(run: str = "t-0001") -> Shelf:
    return Shelf(Path("runs") / run / "checkpoints")


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run() -> None:
    disk = Disk(after=3, frees=True)
    done = go(checkpoint={"every": 3, "keep": 99}, epochs=3, observers=[disk])
    assert (done.status, done.steps) == ("done", 30)
    kept = shelf().versions()
    assert (kept[0], kept[-1]) == (3, 30)
    assert 6 not in kept
    assert disk.told[0] == (
        "the checkpoint of step 6 could not be written: [Errno 27] File too large; "
        "training goes on with the one of step 3"
    )
    assert not list(shelf().folder.glob(".*"))


def test_a_disk_that_is_full_at_the_end_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-0000000010"):
        go(checkpoint={"every": 4}, observers=[Disk(after=8)])
    assert shelf().versions() == [4, 8]


def test_a_run_that_breaks_off_leaves_its_last_update_behind() -> None:
    whole = go()
    with pytest.raises(Trouble):
        go(broken_at=8)
    broken = shelf("t-0002").load()
    assert (broken["strategy"]["version"], shelf("t-0002").versions()) == (7, [7])
    assert int(broken["strategy"]["model"]["norm.num_batches_tracked"]) == 7, "as after 7 updates"
    resumed = train(task(), resume="t-0002")
    assert (resumed.steps, resumed.samples) == (10, ROWS)
    ended, wanted = resumed.model.state_dict(), whole.model.state_dict()
    for name, value in wanted.items():
        assert torch.equal(ended[name], value), name


def test_a_run_that_breaks_off_before_its_first_update_leaves_none() -> None:
    with pytest.raises(Trouble):
        go(broken_at=1)
    assert shelf().versions() == []


def test_the_first_error_is_told_even_if_the_last_update_cannot_be_saved() -> None:
    disk = Disk(after=0)
    with pytest.raises(Trouble):
        go(broken_at=8, observers=[disk])
    assert shelf().versions() == []
    assert disk.told[0].startswith("the last update was not saved: CheckpointError: cannot write")
    assert disk.told[1] == "pass 8"


class HalfWay(torch.optim.SGD):
    """Breaks down when some parameters are updated and others are not."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1.0)
        raise Trouble("in the middle of an update")


def test_a_state_that_is_no_version_at_all_is_not_saved() -> None:
    broken = task()
    broken.optimizer = lambda parameters: HalfWay(parameters, lr=0.1)
    with pytest.raises(Trouble):
        train(broken, batch_size=BATCH, epochs=1, track={"report": False})
    assert shelf().versions() == []
