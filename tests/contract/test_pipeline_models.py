"""Pipelines of odd models, and what their members hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.core.config import OptimizerSection, SyncSection
from echelon.core.types import Batch
from echelon.models.resnet import BLOCKS, ResNet, ResNetOptions
from echelon.strategy.pipeline.schedule import how_many, pieces
from echelon.task import prepare

from . import members, networks
from .jobs import difference, strategy
from .pipelines import batches, copied, piped, steps, task

pytestmark = pytest.mark.timeout(300)


class ByHand(nn.Module):
    """A chain that is no nn.Sequential, with frozen and unused layers and one without weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Tanh()
        self.frozen = nn.Linear(6, 16).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Idle())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.frozen(self.scale(x))))


class Idle(nn.Module):
    """Has a weight and never uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_frozen_unused_and_weightless_layers_are_as_in_one_process() -> None:
    decaying = OptimizerSection(name="adamw", lr=1e-2, weight_decay=0.1, decay="matrices")

    def other_column(model: nn.Module, batch: Batch) -> Any:
        return model(batch["features"])

    chosen = task("mlp")
    columns = networks.data("mlp")
    chosen.model, chosen.forward = ByHand, other_column
    chosen.train = {"features": columns["x"], "y": columns["y"]}
    chosen = prepare(chosen)
    renamed: list[Batch] = [{"features": b["x"], "y": b["y"]} for b in batches("mlp", 6)]
    one = strategy("single", chosen, optimizer=decaying)
    steps(one, renamed)
    expected = copied(one)

    def work(group: Group) -> list[Any]:
        found: list[Any] = []
        for data, split in ((1, ("frozen", "body", "head")), (2, ("frozen",))):
            built = piped(group, chosen, data=data, split=split, optimizer=decaying)
            steps(built, renamed)
            mine = copied(built)
            found.append(difference(mine, expected) if group.index == 0 else 0.0)
            found.append(built.rate())
        held = sum(p.numel() for p in built.model.parameters() if not p.is_meta)
        whole = sum(p.numel() for p in built.model.parameters())
        return [*found, held, whole]

    *apart, held, whole = members.run(4, work)
    assert max(apart[0], apart[2]) <= 1e-5
    assert apart[1] == apart[3] == 1e-2
    assert (held, whole) == (0, 438), "others' layers take no memory here"


class Repeating(nn.Module):
    """Layers that write over what they get, and some that come by twice, one with weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.again, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.bend = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Any:
        for layer in (self.first, self.bend, self.again, self.bend, self.again, self.bend):
            x = layer(x)
        return self.last(x)


def test_layers_that_write_over_their_input_or_come_by_twice_are_as_in_one_process() -> None:
    chosen = task("mlp")
    chosen.model = Repeating
    one = strategy("single", chosen)
    steps(one, batches("mlp", 4))
    expected = copied(one)

    def work(group: Group) -> list[float]:
        found = []
        for schedule, split in (("1f1b", ()), ("1f1b", ("bend",)), ("zero_bubble", ("bend",))):
            built = piped(group, chosen, schedule, split=split)
            steps(built, batches("mlp", 4))
            mine = copied(built)
            found.append(difference(mine, expected) if group.index == 0 else 0.0)
        return found

    assert max(members.run(2, work)) <= 1e-5


def test_the_built_in_resnet_is_as_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, 18, (1, 1, 0, 0))  # less of the same

    def small() -> nn.Module:
        torch.manual_seed(1)
        return ResNet((1, 8, 8), 3, ResNetOptions()).double()

    chosen, found = task("cnn64"), networks.batches("cnn64", size=4, count=6)
    chosen.model = small
    one = strategy("single", chosen)
    for batch in found:
        one.compute(pieces(batch, how_many(4, 2, None)))
        assert one.update().committed
    expected = copied(one)

    def work(group: Group) -> list[Any]:
        built = piped(group, chosen, batch=4)
        steps(built, found)
        mine = copied(built)
        held = sum(p.numel() for p in built.model.parameters() if not p.is_meta)
        return [difference(mine, expected) if group.index == 0 else 0.0, held]

    apart, held = members.run(2, work)
    assert apart <= 1e-9
    assert 0 < held < sum(w.numel() for w in expected.values())


def test_noise_that_the_forward_adds_is_new_in_every_micro_batch_and_step() -> None:
    def work(group: Group) -> list[float]:
        seen: list[float] = []

        def noisy(model: nn.Module, batch: Batch) -> Any:
            noise = torch.randn_like(batch["x"])  # type: ignore[arg-type]
            seen.append(float(noise[0, 0]))
            return model(batch["x"] + noise)  # type: ignore[operator]

        chosen = task("mlp")
        chosen.forward = noisy
        built = piped(group, prepare(chosen))
        seen.clear()
        steps(built, batches("mlp", 3))
        return seen

    seen = members.run(2, work)
    assert len(seen) == len(set(seen)) == 3 * how_many(12, 2, None)


def test_others_layers_take_no_memory() -> None:
    def work(group: Group) -> list[int]:
        chosen, made = task("gpt"), list[weakref.ref[nn.Parameter]]()
        make: Callable[[], nn.Module] = chosen.model

        def remembered() -> nn.Module:
            model = make()
            made.extend(weakref.ref(parameter) for parameter in model.parameters())
            return model

        chosen.model = remembered
        built = piped(group, chosen, split=("2",), optimizer=OptimizerSection(name="adagrad"))
        steps(built, batches("gpt", 1))
        here = sum(not parameter.is_meta for parameter in built.model.parameters())
        gc.collect()
        return [here, sum(ref() is not None for ref in made), len(made)]

    here, alive, whole = members.run(2, work)
    assert here == alive < whole / 2


def test_a_replica_without_samples_takes_part() -> None:
    def small() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)
        )

    def trained(name: str, group: Group | None) -> dict[str, Tensor]:
        chosen = task(name)
        chosen.model = small if name == "cnn" else chosen.model
        built = strategy("single", chosen) if group is None else piped(group, chosen, data=2)
        lone = networks.part(batches(name)[0], 0, 6, 2)
        assert [len(batch["y"]) for batch in lone] == [1, 1]
        steps(built, [*batches(name, 1), *lone] if name == "mlp" else lone)
        return copied(built)

    expected = {name: trained(name, None) for name in ("mlp", "cnn")}

    def work(group: Group) -> list[float]:
        found = {name: trained(name, group) for name in expected}
        if group.index:
            return []
        return [difference(found[name], expected[name]) for name in expected]

    assert max(members.run(4, work)) <= 1e-5


def test_replicas_begin_with_the_first_ones_weights_but_for_those_left_out() -> None:
    def work(group: Group) -> list[float]:
        chosen = task("mlp")
        make: Callable[[], nn.Module] = chosen.model

        def different() -> nn.Module:
            model = make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(group.index // 2 + 1))
            return model

        chosen.model = different
        sync = SyncSection(skip_init=("0.*",))
        built = piped(group, chosen, data=2, split=("1",), sync=sync)
        sums = torch.zeros(6)
        for at, parameter in enumerate(built.model.parameters()):
            sums[at] = 0.0 if parameter.is_meta else float(parameter.detach().mean())
        group.collective().sum_(sums)
        return sums.tolist()

    assert members.run(4, work) == [3.0, 3.0, 2.0, 2.0, 2.0, 2.0]


def test_local_batch_norm_leaves_the_first_replicas_figures() -> None:
    def work(group: Group) -> float:
        built = piped(group, task("cnn"), data=2, sync=SyncSection(batch_norm="local"))
        steps(built, batches("cnn", 3))
        figures = [b.double().flatten() for b in built.model.buffers() if not b.is_meta]
        mine = torch.cat([*figures, torch.zeros(40)])[:40] * (1 - 2 * built.shard.index)
        group.collective([group.index % 2, group.index % 2 + 2]).sum_(mine)
        return float(mine.abs().max())

    assert members.run(4, work) == 0
