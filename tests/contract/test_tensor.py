"""Members that compute every layer together end where one process ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.core.errors import NonFiniteError
from echelon.core.interfaces import Task
from echelon.core.types import Ask, Parallel
from echelon.models.gpt import GPT, GPTOptions

from . import members, networks
from .jobs import difference, strategy
from .trained import ADAM, CASE, CASES, alone, go, weights
from .trained import built as trained_as

pytestmark = pytest.mark.timeout(300)

JOBS = [
    *(("mlp", case) for case in CASES if case != "plain"),
    ("gpt", "clipped by norm, accumulated"),
    ("gpt", CASE),
]


built = functools.partial(trained_as, "tensor")


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_ends_on_the_weights_of_one_process(mesh: dict[str, int]) -> None:
    expected = {job: alone(*job) for job in JOBS}

    def work(group: Group) -> dict[str, float]:
        found = {}
        for name, case in JOBS:
            trained = built(networks.task(name), case, group, Parallel(mesh=mesh))
            go(trained, name, case, slice(20))
            found[f"{name}, {case}"] = difference(weights(trained), expected[name, case])
        return found

    found = members.run(mesh["tensor"] * mesh.get("data", 1), work)
    assert max(found.values()) <= 1e-5, found


def test_what_one_process_saved_a_team_goes_on_with_and_the_other_way_round() -> None:
    expected = alone("gpt", CASE)
    first = built(networks.task("gpt"), CASE)
    go(first, "gpt", CASE, slice(0, 6))
    early = first.state_dict()

    def work(group: Group) -> list[float]:
        trained = built(networks.task("gpt"), CASE, group)
        assert trained.size() == first.size()
        trained.load_state_dict(early)
        go(trained, "gpt", CASE, slice(6, 13))
        state = trained.state_dict()
        if group.index:
            return []
        shapes = {name: value.shape for name, value in state["model"].items()}
        assert shapes == {name: value.shape for name, value in early["model"].items()}
        last = built(networks.task("gpt"), CASE)
        last.load_state_dict(state)
        go(last, "gpt", CASE, slice(13, 20))
        return [difference(weights(last), expected)]

    assert max(members.run(4, work)) <= 1e-5


def test_figures_are_those_of_all_samples_and_wishes_those_of_all_members() -> None:
    batch = networks.batches("mlp")[0]
    single = built(networks.task("mlp"), CASE)
    expected = single.compute([batch], backward=False)
    single.compute([batch])
    update = single.update()

    def work(group: Group) -> list[float]:
        trained = built(networks.task("mlp"), CASE, group, Parallel(mesh={"data": 2, "tensor": 2}))
        shard = trained.shard
        mine = networks.part(batch, shard.index, shard.count, 1)
        total = trained.total(trained.compute(mine, backward=False))
        group.asked = Ask.SIGNAL if group.index == 1 else Ask.NOTHING
        trained.compute(mine)
        done = trained.update()
        figures = [float(total.loss_sum), total.weight]
        return [*figures, done.loss_sum, done.weight, done.asked, done.peers]

    figures = [float(expected.loss_sum), 12, update.loss_sum, 12, Ask.SIGNAL, 4]
    assert members.run(4, work) == pytest.approx(figures, rel=1e-5)


def test_dropout_is_alike_where_activations_are_and_different_where_they_are_parts() -> None:
    options = GPTOptions(layers=2, heads=4, width=16, dropout=0.3)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return GPT(networks.WORDS, networks.LENGTH, options)

    def work(group: Group) -> list[float]:
        torch.manual_seed(group.index)  # made alike by the strategy
        found = []
        for recompute in (False, True):
            trained = strategy(
                "tensor",
                Task(model, networks.task("gpt").loss),
                optimizer=ADAM,
                recompute=recompute,
                comm=group,
            )
            drawn: list[Tensor] = []
            block: Any = trained.model[1]  # type: ignore[index]
            part = nn.Dropout(0.5)  # in front of what brings the parts together
            block.mlp.out.register_forward_pre_hook(
                lambda _, x, part=part, drawn=drawn: drawn.append(part(x[0] * 0 + 1))
            )
            for batch in networks.batches("gpt", count=4):
                trained.compute([batch])
                assert trained.update().committed
            replicated = trained.model.get_parameter("0.tokens.weight").detach().clone()
            others = replicated.clone()
            pair = group.collective()
            pair.broadcast_([others])
            masks = [drawn[0].clone(), drawn[-1].clone()]
            pair.broadcast_(masks)
            same = float((masks[0] == drawn[0]).float().mean())
            repeated = float((drawn[0] == drawn[-1][: len(drawn[0])]).float().mean())
            found += [float((others - replicated).abs().max()), same, repeated]
        gathered = torch.tensor(found if group.index else [0.0] * 6)
        group.collective().sum_(gathered)
        return gathered.tolist()

    found = members.run(2, work)
    for apart, same, repeated in (found[:3], found[3:]):
        assert apart == 0
        assert 0.4 < same < 0.6
        assert 0.4 < repeated < 0.6


def test_an_update_that_is_not_finite_is_refused_by_all_and_its_cause_is_named() -> None:
    def root(output: Tensor, _batch: object) -> tuple[Tensor, float]:
        return (output - output.detach()).abs().sqrt().sum(), 1.0  # finite, its slope is not

    def work(group: Group) -> list[str]:
        parallel = Parallel(mesh={"data": 2, "tensor": 2})
        trained = built(networks.task("mlp"), CASE, group, parallel)
        shard = trained.shard
        batch = dict(networks.part(networks.batches("mlp")[0], shard.index, shard.count)[0])
        if shard.index == 1:
            batch["x"] = torch.full_like(batch["x"], float("nan"))  # type: ignore[arg-type]
        before = weights(trained)
        trained.compute([batch])
        with pytest.raises(NonFiniteError) as caught:
            trained.update()
        assert difference(weights(trained), before) == 0
        go(trained, "mlp", CASE, slice(1, 2))
        steep = built(Task(networks.MODELS["mlp"], root), CASE, group, parallel)
        steep.compute(networks.part(networks.batches("mlp")[0], shard.index, shard.count))
        with pytest.raises(NonFiniteError) as found:
            steep.update()
        return [str(caught.value), str(found.value)]

    column, layer = members.run(4, work)
    assert "step 1: the loss is nan: input column 'x' is not finite (member 2)" in column
    assert "the gradient of layer '0.0.weight' is not finite" in layer


def test_half_precision_trains_and_the_inspector_sees_norms_of_wholes() -> None:
    class Look:
        norms: dict[str, float]

        def due(self, version: int) -> bool:
            return version == 1

        def inspect(self, _version: int, weights: Any, grads: Any) -> None:
            assert weights.keys() == grads.keys()
            self.norms = {name: float(grad.norm()) for name, grad in grads.items()}

    def looked(trained: Any) -> dict[str, float]:
        trained._inspector = look = Look()
        go(trained, "mlp", CASE, slice(1))
        return look.norms

    expected = looked(built(networks.task("mlp"), CASE))

    def work(group: Group) -> list[Any]:
        found: list[Any] = [looked(built(networks.task("mlp"), CASE, group))]
        for precision in ("bf16", "fp16"):
            trained = strategy(
                "tensor", networks.task("gpt"), optimizer=ADAM, precision=precision, comm=group
            )
            losses = []
            for batch in networks.batches("gpt", count=1) * 12:
                trained.compute([batch])
                done = trained.update()
                losses += [done.loss_sum] * done.committed  # fp16 finds its scale first
            found.append(losses[-1] / losses[0])
        return found

    norms, low, lower = members.run(2, work)
    assert norms == pytest.approx(expected, rel=1e-4)
    assert max(low, lower) < 0.95


def test_a_ready_model_of_the_users_is_left_as_it_is() -> None:
    def work(group: Group) -> bool:
        ready = networks.MODELS["mlp"]()
        before = {name: value.clone() for name, value in ready.state_dict().items()}
        trained = built(Task(ready, networks.task("mlp").loss), CASE, group, Parallel())
        assert not trained.whole
        trained.compute(networks.part(networks.batches("mlp")[0], trained.shard.index, 1, 2))
        assert trained.update().committed
        return all(torch.equal(before[name], value) for name, value in ready.state_dict().items())

    assert members.run(2, work)
