"""The merit of a gradient: how far it agrees with that of held-out samples of all trainers."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.core.types import Batch
from echelon.data.sources import ColumnSource
from echelon.strategy.parameter_server.merit import Judge, held_out

CPU = torch.device("cpu")


def model_and_part() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, {"x": torch.randn(16, 3), "y": torch.randn(16, 1)}


def judge_of(model: nn.Module, parts: list[Batch], every: int = 1) -> Judge:
    def loss(batch: Batch) -> tuple[Tensor, float]:
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(), 16.0

    return Judge(model, loss, list(model.parameters()), parts, every)


def test_a_gradient_that_helps_is_above_0_and_its_opposite_below() -> None:
    model, part = model_and_part()
    judge = judge_of(model, [part])
    model.eval()
    ((model(part["x"]) - part["y"]) ** 2).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.train()
    assert judge.merit(grads) == pytest.approx(1.0, abs=1e-5)
    assert judge.merit([-3 * grad for grad in grads]) == pytest.approx(-1.0, abs=1e-5)
    assert judge.merit([torch.zeros_like(grad) for grad in grads]) == 0.0


def test_looking_changes_nothing() -> None:
    model, part = model_and_part()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    judge_of(model, [part]).merit([torch.ones_like(p) for p in model.parameters()])
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_one_spoilt_part_of_three_has_no_say() -> None:
    model, part = model_and_part()
    spoilt = {**part, "y": -100.0 * part["y"]}  # type: ignore[operator]
    grads = [torch.randn_like(p) for p in model.parameters()]
    fair = judge_of(model, [part]).merit(grads)
    assert judge_of(model, [part, spoilt, part]).merit(grads) == pytest.approx(fair)


def test_not_every_gradient_is_measured() -> None:
    model, part = model_and_part()
    judge = judge_of(model, [part], every=3)
    grads = [torch.ones_like(p) for p in model.parameters()]
    found = [math.isnan(judge.merit(grads)) for _ in range(7)]
    assert found == [False, True, True, False, True, True, False]


class Meeting:
    """Members that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=20)
        self.given: dict[int, Any] = {}


class Peer:
    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self.index, self.count = meeting, index, meeting.count

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._all(list(values)), strict=True)]

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        for mine, theirs in zip(tensors, self._all(list(tensors))[source], strict=True):
            mine.copy_(theirs)
        self._meeting.barrier.wait()

    def _all(self, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.given[self.index] = value
        meeting.barrier.wait()
        found = [meeting.given[at] for at in range(self.count)]
        meeting.barrier.wait()
        return found


def held_by_all(sources: list[ColumnSource], samples: int) -> list[list[Batch]]:
    meeting = Meeting(len(sources))
    found: dict[int, list[Batch]] = {}

    def look(at: int) -> None:
        peer: Any = Peer(meeting, at)
        found[at] = held_out(sources[at], peer, samples, CPU)

    threads = [threading.Thread(target=look, args=(at,)) for at in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[at] for at in range(len(sources))]


def test_all_trainers_have_the_parts_of_all() -> None:
    sources = [
        ColumnSource({"x": torch.arange(30.0) + 100 * at, "y": torch.arange(30)}) for at in range(3)
    ]
    found = held_by_all(sources, 9)
    assert len(found[0]) == 3
    for parts in found:
        for at, part in enumerate(parts):
            x, y = part["x"], part["y"]
            assert isinstance(x, Tensor)
            assert isinstance(y, Tensor)
            assert torch.equal(x, y + 100.0 * at), "of trainer `at`"
    rows = torch.cat([part["y"] for part in found[0]])  # type: ignore[misc]
    assert len(rows.unique()) == 9


def test_parts_that_are_not_alike_are_not_exchanged() -> None:
    sources = [ColumnSource({"x": torch.zeros(30, 2 + at)}) for at in range(2)]
    found = held_by_all(sources, 8)
    assert [len(parts) for parts in found] == [1, 1]
    assert [parts[0]["x"].shape for parts in found] == [(4, 2), (4, 3)]  # type: ignore[union-attr]


def test_few_held_out_samples_are_enough() -> None:
    (parts,) = held_by_all([ColumnSource({"x": torch.zeros(2, 1)})], 100)
    assert [part["x"].shape for part in parts] == [(2, 1)]  # type: ignore[union-attr]
