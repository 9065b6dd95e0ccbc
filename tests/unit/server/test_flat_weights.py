"""Updates of flat weights, divided over shards, give the same result as one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm.ps.layout import Layout, Partition
from echelon.comm.ps.state import Part, divide, join
from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError
from echelon.optim.gradients import clip_norm_, clip_value_
from echelon.server.weights import Flats, Stale
from tests.unit.server.odd_model import (
    Odd,
    OneProcess,
    flats_of,
    gradients,
    partition_of,
    staged,
)

SECTIONS: list[dict[str, Any]] = [
    {"name": "sgd", "lr": 0.1},
    {"name": "sgd", "lr": 0.1, "l2": 0.01},
    {"name": "momentum", "lr": 0.1},
    {"name": "momentum", "lr": 0.1, "l2": 0.02, "decay": "all"},
    {"name": "nesterov", "lr": 0.1, "l2": 0.01},
    {"name": "adagrad", "lr": 0.1},
    {"name": "rmsprop", "lr": 0.01},
    {"name": "rmsprop", "lr": 0.01, "momentum": 0.5, "l1": 0.01},
    {"name": "adam", "lr": 0.01},
    {"name": "adam", "lr": 0.01, "l1": 0.01, "l2": 0.01, "weight_decay": 0.1},
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "l2": 0.01, "decay": "all"},
]
Named = dict[str, Tensor]


def words(section: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in section.items() if key != "lr")


def summed(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def begun(section: OptimizerSection, shards: int, one: OneProcess) -> tuple[Partition, list[Flats]]:
    partition = partition_of(one.model, section, shards)
    flats = flats_of(partition, section)
    for mine, part in zip(flats, divide(partition, one.state()), strict=True):
        mine.load(part)
    return partition, flats


def update(
    partition: Partition, flats: list[Flats], pushes: list[Named], weight: float, **how: Any
) -> None:
    parts = [staged(partition, push) for push in pushes]
    for shard, mine in enumerate(flats):
        mine_staged = [part[shard] for part in parts]
        for _ in mine.apply(mine_staged, scale=1 / weight, factor=how.pop("factor", 1.0), **how):
            pass


def agrees(partition: Partition, flats: list[Flats], one: OneProcess) -> None:
    state = join(partition, [mine.part() for mine in flats])
    for name, values in state["model"].items():
        torch.testing.assert_close(values, one.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    theirs = one.stepper.state_dict()
    assert state["optimizer"]["groups"] == theirs["groups"]
    kept = state["optimizer"]["state"]
    assert kept.keys() == theirs["state"].keys()
    for name, values in theirs["state"].items():
        torch.testing.assert_close(kept[name], dict(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("given", SECTIONS, ids=words)
def test_updates_are_those_of_one_process(given: dict[str, Any], shards: int) -> None:
    section = OptimizerSection(**given)
    one = OneProcess(section)
    partition, flats = begun(section, shards, one)
    for step in range(4):
        pushes = [gradients(one.model, 10 * step + trainer) for trainer in range(1 + step % 3)]
        total = {n: summed([push[n] for push in pushes]) / 7 for n in pushes[0]}
        factor = 1 / (step + 1)
        one.step(total, factor)
        for shard, mine in enumerate(flats):
            parts = [staged(partition, push)[shard] for push in pushes]
            for _ in mine.apply(parts, scale=1 / 7, factor=factor):
                pass
    agrees(partition, flats, one)


@pytest.mark.parametrize("given", SECTIONS, ids=words)
def test_a_parameter_nobody_has_a_gradient_of_stays_as_it_is(given: dict[str, Any]) -> None:
    section = OptimizerSection(**given)
    one = OneProcess(section)
    partition, flats = begun(section, 2, one)
    names = [slot.name for slot in partition.layout.slots]
    first = gradients(one.model, 0)  # all have state before some are left out
    one.step(first, 1.0)
    update(partition, flats, [first], 1.0)
    for step, absent in enumerate([["wide.weight"], ["scale", "conv.weight"], []], start=1):
        grads = {n: g for n, g in gradients(one.model, step).items() if n not in absent}
        one.step({n: g / 3 for n, g in grads.items()}, 1.0)
        for shard, mine in enumerate(flats):
            missing = [names.index(name) for name in absent]
            for _ in mine.apply(
                [staged(partition, grads)[shard]], scale=1 / 3, factor=1.0, missing=missing
            ):
                pass
    agrees(partition, flats, one)


@pytest.mark.parametrize("given", SECTIONS, ids=words)
def test_one_process_goes_on_from_the_servers_and_they_from_it(given: dict[str, Any]) -> None:
    section = OptimizerSection(**given)
    one = OneProcess(section)
    one.step(gradients(one.model, 1), 0.5)
    partition, flats = begun(section, 3, one)
    agrees(partition, flats, one)
    update(partition, flats, [gradients(one.model, 2)], 1.0)
    state = join(partition, [mine.part() for mine in flats])
    other = OneProcess(section)
    other.model.load_state_dict(state["model"], strict=False)
    other.stepper.load_state_dict(state["optimizer"])
    one.step(gradients(one.model, 2), 1.0)
    one.step(gradients(one.model, 3), 1.0)
    other.step(gradients(one.model, 3), 1.0)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("l1", [0.0, 0.01])
def test_clipping_by_norm_and_by_value(l1: float) -> None:
    section = OptimizerSection(name="sgd", lr=0.1, l1=l1)
    one = OneProcess(section)
    partition, flats = begun(section, 2, one)
    pushes = [gradients(one.model, 1), gradients(one.model, 2)]
    total = {name: (pushes[0][name] + pushes[1][name]) / 5 for name in pushes[0]}
    clip_norm_(list(total.values()), 0.7)
    one.step(total, 1.0)
    parts = [staged(partition, push) for push in pushes]
    squares = [mine.reduce([part[at] for part in parts]) for at, mine in enumerate(flats)]
    norm = sum(squares) ** 0.5 / 5
    for at, mine in enumerate(flats):
        for _ in mine.apply([parts[0][at]], scale=1 / 5, clip=0.7 / (norm + 1e-6), factor=1.0):
            pass
    agrees(partition, flats, one)

    third = gradients(one.model, 3)
    clipped = {name: grad / 5 for name, grad in third.items()}
    clip_value_(list(clipped.values()), 0.05)
    one.step(clipped, 1.0)
    update(partition, flats, [third], 5.0, limit=0.05)
    agrees(partition, flats, one)


def test_chunks_are_told_one_after_the_other() -> None:
    section = OptimizerSection(name="adam")
    one = OneProcess(section)
    partition, (flats,) = begun(section, 1, one)
    before = [held.clone() for held in flats.weights]
    (grads,) = staged(partition, gradients(one.model, 1))
    told = flats.apply([grads], scale=1.0, factor=1.0)
    first = next(told)
    assert (first.range, first.start, first.stop) == (0, 0, 64)
    assert not torch.equal(flats.weights[0][:64], before[0][:64])
    assert torch.equal(flats.weights[0][64:], before[0][64:])
    rest = list(told)
    ends = [
        [(done.start, done.stop) for done in [first, *rest] if done.range == at]
        for at in range(len(flats.weights))
    ]
    for spans, held in zip(ends, flats.weights, strict=True):
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == held.numel()


def test_weights_may_lie_in_memory_of_others() -> None:
    section = OptimizerSection(name="momentum", lr=1.0)
    partition = partition_of(Odd(), section, 1)
    memory = torch.zeros(partition.bytes(0), dtype=torch.uint8)
    flats = Flats(partition, 0, section, partition.carve(0, memory))
    for _ in flats.apply([[torch.ones_like(w) for w in flats.weights]], scale=0.5, factor=1.0):
        pass
    assert all(bool((held == -0.5).all()) for held in partition.carve(0, memory))


def test_a_stale_gradient_is_compensated() -> None:
    section = OptimizerSection(name="sgd", lr=1.0)
    partition = partition_of(Odd(), section, 1)
    flats = Flats(partition, 0, section)
    for held in flats.weights:
        held.fill_(3.0)
    base = [torch.full_like(held, 1.0) for held in flats.weights]
    pushes = [[torch.full_like(h, value) for h in flats.weights] for value in (4.0, 6.0)]
    stale = [Stale(base, strength=0.5), None]
    for _ in flats.apply(pushes, scale=0.5, factor=1.0, stale=stale):
        pass
    # 2 + 0.5·2²·(3 − 1) for the first, 3 for the second
    assert all(bool((held == 3.0 - (6.0 + 3.0)).all()) for held in flats.weights)


def test_a_compensated_gradient_is_nearer_to_the_one_on_the_new_weights() -> None:
    """Logistic regression, where the square of a gradient says something about its curvature."""
    torch.manual_seed(3)
    x, truth = torch.randn(4000, 8), torch.randn(8)
    y = (torch.rand(4000) < torch.sigmoid(x @ truth)).float()

    def gradient(w: Tensor) -> Tensor:
        return x.T @ (torch.sigmoid(x @ w) - y) / len(x)

    then = torch.zeros(8)
    now = then - 2.0 * gradient(then)
    layout = Layout.of(["w"], [then], [True])
    flats = Flats(Partition(layout, 1), 0, OptimizerSection(name="sgd", lr=1.0))
    errors = []
    for strength in (0.0, 2.0):
        flats.weights[0][:8] = now
        push, base = torch.zeros_like(flats.weights[0]), torch.zeros_like(flats.weights[0])
        push[:8], base[:8] = gradient(then), then
        stale = [Stale([base], strength) if strength else None]
        for _ in flats.apply([[push]], scale=1.0, factor=1.0, stale=stale):
            pass
        errors.append(float((now - flats.weights[0][:8] - gradient(now)).norm()))
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adagrad"])
def test_other_precisions(name: Any, dtype: torch.dtype) -> None:
    section = OptimizerSection(name=name, lr=0.1)
    one = OneProcess(section, dtype)
    partition, flats = begun(section, 2, one)
    for step in range(3):
        grads = gradients(one.model, step)
        update(partition, flats, [grads], 3.0)
        one.step({n: g / 3 for n, g in grads.items()}, 1.0)
    state = join(partition, [mine.part() for mine in flats])["model"]
    close = 1e-12 if dtype == torch.float64 else 3e-2
    for key, values in state.items():
        torch.testing.assert_close(values, one.model.state_dict()[key], rtol=close, atol=close)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    adam, sgd = OptimizerSection(name="adam"), OptimizerSection(name="sgd")
    one = OneProcess(adam)
    partition, flats = begun(adam, 1, one)
    before = [held.clone() for held in flats[0].weights]
    other = OneProcess(sgd)
    with pytest.raises(CheckpointError, match="of another optimizer"):
        flats[0].load(divide(partition, other.state())[0])
    part = flats[0].part()
    with pytest.raises(CheckpointError, match="holds odd; it should hold exp_avg, exp_avg_sq"):
        flats[0].load(Part(part.weights, {"odd": part.weights}, part.steps, part.groups))
    assert all(map(torch.equal, before, flats[0].weights))
    with pytest.raises(CheckpointError, match="lacks the options of"):
        flats[0].load(
            Part(part.weights, part.state, part.steps, {"plain": part.groups["penalised"]})
        )
