"""Half precision, recomputing, dropout, and faults: as in one process, and said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.checkpoint import Shelf
from echelon.comm.group import Group
from echelon.core.errors import ConfigError, NonFiniteError, PeerError, TaskError
from echelon.core.interfaces import Strategy
from echelon.core.types import Batch

from . import members, networks
from .jobs import difference
from .pipelines import ADAM, batches, copied, piped, steps, task

pytestmark = pytest.mark.timeout(300)


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

    def half(group: Group, precision: str, schedule: str) -> float:
        built = piped(group, task("mlp"), schedule, precision=precision)
        everything = networks.data("mlp")
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
            half(group, "bf16", "zero_bubble"),
            half(group, "fp16", "1f1b"),
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


def test_what_cannot_be_a_pipeline_is_refused_in_one_line() -> None:
    def work(group: Group) -> list[str]:
        found = []
        with pytest.raises(ConfigError) as caught:
            piped(group, task("mlp"), compile=True)
        found.append(str(caught.value))
        with pytest.raises(ConfigError) as caught:
            piped(group, task("mlp"), split=("0", "1"))
        found.append(str(caught.value))
        noting = task("mlp")
        noting.model = lambda: nn.Sequential(Noting(6, 16), nn.Linear(16, 3))
        with pytest.raises(TaskError) as noted:
            piped(group, noting)
        found.append(str(noted.value))
        unlike = task("mlp")
        unlike.model = lambda: nn.Sequential(nn.Linear(6, 16), Fickle(), nn.Linear(16, 3))
        built = piped(group, unlike, split=("2",))
        steps(built, batches("mlp", 1))
        Fickle.short = True
        with pytest.raises(PeerError if group.index else TaskError) as refusal:
            steps(built, batches("mlp", 1))
        return [*found, str(refusal.value)]

    compiled, split, noted, fickle = members.run(2, work)
    assert "compile: true does not go with strategy 'pipeline'" in compiled
    assert "pipeline.split names 2 layers, which makes 3 stages" in split
    assert "the model keeps '0._extra_state', which is no tensor" in noted
    assert "layer '1' gives a tensor of" in fickle


class Noting(nn.Linear):
    """Has something of its own to be saved."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


class Fickle(nn.Module):
    """How much it gives depends on the values it gets."""

    short = False

    def forward(self, x: Tensor) -> Tensor:
        return x[:1] if self.short else x
