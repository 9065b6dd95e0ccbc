"""Odd models, losses and optimizers: members train them like one process, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon import cross_entropy
from echelon.comm.group import Group
from echelon.core.config import OptimizerSection
from echelon.core.errors import TaskError
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch
from echelon.models.layers import BatchNorm1d

from . import members, networks
from .jobs import difference, strategy
from .levels import LEVELS, arranged
from .trained import weights

pytestmark = pytest.mark.timeout(300)
KINDS = ("all_reduce", *LEVELS)
ADAMW = OptimizerSection(name="adamw", lr=1e-2, weight_decay=0.1)


def made(kind: str | None, task: Task, comm: Group | None = None, **options: Any) -> Strategy:
    """One process, all_reduce, or a level of sharded."""
    if kind in LEVELS:
        return strategy("sharded", task, comm=comm, parallel=arranged(kind), **options)
    return strategy(kind or "single", task, comm=comm, **options)


def through(trained: Strategy, batches: Sequence[Batch], micro: int = 1) -> dict[str, Tensor]:
    shard = trained.shard
    for batch in batches:
        trained.compute(networks.part(batch, shard.index, shard.count, micro))
        assert trained.update().committed
    return weights(trained)


def compared(
    make: Callable[[], Task], batches: Sequence[Batch], kinds: Iterable[str] = KINDS, **options: Any
) -> dict[str, float]:
    """How far two members of each kind end from one process."""
    alone = through(made(None, make(), **options), batches)

    def work(group: Group) -> dict[str, float]:
        found = {}
        for kind in kinds:
            mine = through(made(kind, make(), group, **options), batches)
            found[kind] = difference(mine, alone) if group.index == 0 else 0.0
        return found

    found: dict[str, float] = members.run(2, work)
    return found


def batches(*sizes: int) -> list[Batch]:
    cut = networks.data("mlp")
    return [{name: column[:size] for name, column in cut.items()} for size in sizes]


class Choosy(nn.Module):
    """Cannot take a batch of no samples, and gives more than its loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(6, 8, bias=False), BatchNorm1d(8)
        self.head, self.idle = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(x))
        x = torch.tanh(x.view(x.size(0), -1))
        return self.head(x), self.idle(x)


def mean_times_count(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, float]:
    labels = batch["y"]
    assert isinstance(labels, Tensor)
    return F.cross_entropy(output[0], labels) * len(labels), len(labels)


def test_members_without_samples_change_nothing() -> None:
    found = compared(lambda: Task(Choosy, mean_times_count), batches(9, 1, 4, 1), optimizer=ADAMW)
    assert max(found.values()) <= 1e-5, found


def frozen_first() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def test_a_users_optimizer_may_hold_frozen_parameters_and_groups_of_its_own() -> None:
    def task() -> Task:
        model = frozen_first()
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": [model[2].weight], "lr": 0.1},
            {"params": [model[2].bias], "weight_decay": 0.5},
        ]
        return Task(model, cross_entropy, optimizer=lambda _: torch.optim.AdamW(groups, lr=0.01))

    found = compared(task, batches(9, 4), ("optimizer", "gradients"))
    assert max(found.values()) <= 1e-5, found


def test_an_optimizer_whose_hook_changes_gradients_has_its_own() -> None:
    """Gradients of this size lie in memory that all members read."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 4000), nn.Tanh(), nn.Linear(4000, 3))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1, fused=True)

        def halve(given: torch.optim.Optimizer, _args: Any, _options: Any) -> None:
            for parameter in given.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

        made.register_step_pre_hook(halve)
        return made

    found = compared(
        lambda: Task(model, cross_entropy, optimizer=optimizer), batches(9, 9), ("all_reduce",)
    )
    assert max(found.values()) <= 1e-5, found


class Dropping(nn.Module):
    """Leaves out another layer in every member."""

    def __init__(self, member: int, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.member = member
        self.first, self.norm = nn.Linear(6, 8), BatchNorm1d(8) if norm else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for number, layer in enumerate(self.layers):
            x = x if number == self.member else torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("level", "norm"), [("gradients", True), ("parameters", False)])
def test_members_in_different_layers_are_told_before_their_numbers_mix(
    level: str, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.strategy.sharded import slabs

    monkeypatch.setattr(slabs, "SLAB", 1)  # each gradient is summed as soon as it is there

    def work(group: Group) -> None:
        task = Task(lambda: Dropping(group.index, norm), cross_entropy)
        through(made(level, task, group), batches(9))

    with pytest.raises(TaskError, match="members went through different layers"):
        members.run(2, work)


def test_members_may_leave_out_different_layers_where_nothing_is_gathered() -> None:
    def work(group: Group) -> float:
        task = Task(lambda: Dropping(group.index, norm=False), cross_entropy)
        mine = through(made("gradients", task, group), batches(9, 4))
        sums = {name: value.clone() for name, value in mine.items()}
        for value in sums.values():
            group.collective().sum_(value)
        return difference({name: value / 2 for name, value in sums.items()}, mine)

    assert members.run(2, work) <= 1e-7


class Reentrant(nn.Module):
    """One layer in two places, each recomputed torch's old way: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 8), nn.Linear(8, 8)
        self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        x = checkpoint(self.shared, self.between(x), use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["all_reduce", "gradients"])
def test_a_gradient_that_comes_in_parts_is_not_taken_for_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.strategy import all_reduce

    monkeypatch.setattr(all_reduce, "EARLY", 0)
    trained = made(kind, Task(Reentrant, cross_entropy))
    with pytest.raises(TaskError, match=r"the gradient of 'shared\.\w+' came in several parts"):
        trained.compute(batches(9))
    trained.close()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_ready_model_is_given_back_without_what_was_hung_on_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.strategy import all_reduce

    monkeypatch.setattr(all_reduce, "EARLY", 0)
    model = Choosy()
    model.first.forward = plain = lambda x: x @ model.first.weight.t()  # type: ignore[method-assign]
    trained = made(kind, Task(model, mean_times_count), recompute=True)
    through(trained, batches(9))
    trained.close()
    assert model.first.forward is plain
    assert "forward" not in model.norm.__dict__
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages)
    mean_times_count(model(batches(9)[0]["x"]), batches(9)[0])[0].backward()
    assert model.first.weight.grad is not None


def test_layers_whose_weights_are_read_from_elsewhere_are_not_gathered_alone() -> None:
    """As a table of places, and what torch's own attention multiplies with."""
    task = networks.task("gpt")

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.tokens = nn.Embedding(networks.WORDS, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.last = nn.Linear(8, networks.WORDS)

        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            return self.last(self.attend(x, x, x)[0])  # type: ignore[no-any-return]

    other = networks.task("gpt")
    other.model = Attends
    few = networks.batches("gpt", size=8, count=2)
    alone = [through(made(None, each), few) for each in (task, other)]

    def work(group: Group) -> float:
        from echelon.strategy.sharded import fsdp

        fsdp.UNIT = 0
        mine = [through(made("parameters", each, group), few) for each in (task, other)]
        pairs = zip(mine, alone, strict=True)
        return max(difference(*pair) for pair in pairs) if group.index == 0 else 0.0

    assert members.run(2, work) <= 1e-5
