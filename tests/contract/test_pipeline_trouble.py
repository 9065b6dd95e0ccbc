"""Pipelines of odd models, in half precision, with faults: as one process, or said in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.checkpoint import Shelf
from echelon.comm.group import Group
from echelon.core.config import OptimizerSection, SyncSection
from echelon.core.errors import ConfigError, NonFiniteError, PeerError, TaskError
from echelon.core.protocols import Strategy
from echelon.core.types import Batch
from echelon.task import prepare

from . import members, networks
from .jobs import difference, strategy
from .pipelines import ADAM, batches, copied, piped, steps, task

pytestmark = pytest.mark.timeout(120)


def test_an_update_that_is_not_finite_is_refused_by_all_who_name_the_layer() -> None:
    def spoil(built: Strategy, name: str) -> None:
        parameter = dict(built.model.named_parameters())[name]
        if not parameter.is_meta:
            with torch.no_grad():
                parameter.view(-1)[0] = torch.nan

    def root(output: Tensor, _batch: Batch) -> tuple[Tensor, float]:
        return (output - output.detach()).abs().sqrt().sum(), 1.0  # finite, its slope is not

    def refused(built: Strategy, batch: Batch) -> str:
        before = copied(built)
        built.compute(networks.part(batch, built.shard.index, built.shard.count, 2))
        with pytest.raises(NonFiniteError) as caught:
            built.update()
        after = copied(built)
        assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before), (
            "nothing of a refused update stays"
        )
        return str(caught.value)

    def work(group: Group) -> list[str]:
        found = []
        first = piped(group, task("cnn"), data=2, micro=2)
        bad = dict(batches("cnn")[0])
        bad["x"] = bad["x"].clone()  # type: ignore[union-attr]
        bad["x"][-1] = torch.nan  # type: ignore[index]
        found.append(refused(first, bad))
        steps(first, batches("cnn", 1), 2)
        spoil(first, "4.0.weight")
        found.append(refused(first, batches("cnn")[1]))
        steep = task("mlp")
        steep.loss = root
        found.append(refused(piped(group, steep, data=2, micro=2), batches("mlp")[0]))
        world = group.collective()
        length = torch.tensor([len("".join(found))])
        world.sum_(length)
        assert int(length) == world.count * len("".join(found)), "all say the same"
        return found

    column, layer, gradient = members.run(4, work)
    assert column.startswith("step 1: the loss is nan: input column 'x' is not finite (member 2")
    assert layer.startswith("step 2: the loss is nan: layer '4.0' first gave it")
    assert gradient.startswith("step 1: the gradient of layer '0.0.weight' is not finite")


def test_half_precision_recomputing_and_dropout_train_alike_and_resume() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5),
            nn.Linear(16, 3),
        )  # fmt: skip

    def half(group: Group, precision: str) -> float:
        built, everything = piped(group, task("mlp"), precision=precision), networks.data("mlp")
        before = built.total(built.compute([dict(everything)], backward=False))
        for batch in batches("mlp", 40):
            built.compute([batch])
            built.update()
        after = built.total(built.compute([dict(everything)], backward=False))
        assert all(w.dtype == torch.float32 for w in copied(built).values())
        return float(after.loss_sum) / float(before.loss_sum)

    def recomputing(group: Group, schedule: str) -> float:
        built = piped(group, task("gpt"), schedule, split=("3",), recompute=True)
        steps(built, batches("gpt", 5))
        plain = piped(group, task("gpt"), schedule, split=("3",))
        steps(plain, batches("gpt", 5))
        return difference(copied(built), copied(plain))

    def resumed(group: Group) -> list[float]:
        """Cut otherwise than before, even."""
        chosen = task("mlp")
        chosen.model = dropping
        whole = piped(group, chosen, split=("3",), optimizer=ADAM)
        first = piped(group, chosen, split=("1",), optimizer=ADAM)
        steps(whole, batches("mlp", 6))
        steps(first, batches("mlp", 3))
        state, early = first.state_dict(), copied(first)
        if group.index == 0:
            Shelf(Path("saved")).save(3, state)
        group.collective().barrier()
        second = piped(group, chosen, "zero_bubble", split=("4",), optimizer=ADAM)
        second.load_state_dict(Shelf(Path("saved")).load("last"))
        steps(second, batches("mlp", 6)[3:])
        late, expected = copied(second), copied(whole)
        if group.index:
            return []
        return [difference(late, expected), difference(early, expected)]

    def work(group: Group) -> list[float]:
        return [
            half(group, "bf16"),
            half(group, "fp16"),
            recomputing(group, "1f1b"),
            recomputing(group, "zero_bubble"),
            *resumed(group),
        ]

    bf16, fp16, recomputed, recomputed_apart, same, other = members.run(2, work)
    assert max(bf16, fp16) < 0.7
    assert max(recomputed, recomputed_apart) <= 1e-6
    assert same <= 1e-6
    assert other > 1e-3


def test_an_fp16_overflow_is_refused_by_all_and_tried_again_at_a_smaller_scale() -> None:
    def loud() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), Louder())

    def work(group: Group) -> list[Any]:
        chosen = task("mlp")
        chosen.model = loud
        built = piped(group, chosen, precision="fp16")
        before, reasons = copied(built), []
        for _ in range(30):
            built.compute([batches("mlp")[0]])
            done = built.update()
            if done.committed:
                break
            reasons.append(done.reason)
            assert difference(copied(built), before) == 0
        return [done.committed, done.version, reasons[0]]

    committed, version, reason = members.run(2, work)
    assert (committed, version) == (True, 1)
    assert "tried again with loss scale 32768" in reason


class Louder(nn.Module):
    """Its gradient overflows in fp16 at a large loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 64.0


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


def test_what_cannot_be_a_pipeline_is_refused_in_one_line() -> None:
    def work(group: Group) -> list[str]:
        found = []
        with pytest.raises(ConfigError) as caught:
            piped(group, task("mlp"), compile=True)
        found.append(str(caught.value))
        with pytest.raises(ConfigError) as caught:
            piped(group, task("mlp"), split=("0", "1"))
        found.append(str(caught.value))
        unlike = task("mlp")
        unlike.model = lambda: nn.Sequential(nn.Linear(6, 16), Fickle(), nn.Linear(16, 3))
        built = piped(group, unlike, split=("2",))
        steps(built, batches("mlp", 1))
        Fickle.short = True
        with pytest.raises(PeerError if group.index else TaskError) as refusal:
            steps(built, batches("mlp", 1))
        return [*found, str(refusal.value)]

    compiled, split, fickle = members.run(2, work)
    assert "compile: true does not go with strategy 'pipeline'" in compiled
    assert "pipeline.split names 2 layers, which makes 3 stages" in split
    assert "layer '1' gives a tensor of" in fickle


class Fickle(nn.Module):
    """How much it gives depends on the values it gets."""

    short = False

    def forward(self, x: Tensor) -> Tensor:
        return x[:1] if self.short else x
