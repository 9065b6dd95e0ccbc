"""Batch norm over members is what one process computes, in all its forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.comm.collectives import Solo
from echelon.comm.group import Group
from echelon.core.config import TensorSection
from echelon.core.config.sections import Cut
from echelon.core.interfaces import Task
from echelon.core.types import Batch, Parallel
from echelon.strategy.batch_norm import attend, synchronise, unsynchronise

from . import members, networks
from .jobs import difference, steps, strategy, weights

pytestmark = pytest.mark.timeout(300)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def network(dims: int, bias: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    norm = NORMS[dims - 1](4, **options)
    if not bias:
        norm.register_parameter("bias", None)
    first = CONVOLUTIONS[dims - 1](2, 4, 3, padding=1)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4**dims, 3)).double()


def two_layers_after_it() -> nn.Module:
    body = list(network(1, track_running_stats=False).children())[:-1]
    return nn.Sequential(*body, nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def images(dims: int) -> Batch:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(7, 2, *[4] * dims, generator=draw, dtype=torch.float64) * 2 + 1
    return {"x": x, "y": torch.arange(7) % 3}


FORMS: dict[str, Callable[[], nn.Module]] = {
    "1d": functools.partial(network, 1),
    "2d": functools.partial(network, 2),
    "3d": functools.partial(network, 3),
    "momentum None": functools.partial(network, 1, momentum=None),
    "not affine": functools.partial(network, 1, affine=False),
    "no bias": functools.partial(network, 1, bias=False),
    "untracked": functools.partial(network, 1, track_running_stats=False),
}


def test_every_form_ends_and_evaluates_as_in_one_process() -> None:
    def trained(form: str, comm: Group | None) -> tuple[dict[str, Tensor], float]:
        batch = images(int(form[0]) if form[0].isdigit() else 1)
        built = strategy(
            "single" if comm is None else "all_reduce",
            Task(FORMS[form], cross_entropy),
            recompute=form == "2d",
            comm=comm,
        )
        index, count = built.shard.index, built.shard.count
        steps(built, [networks.part(batch, index, count)] * 3)
        few: Batch = {name: column[:2] for name, column in batch.items()}  # type: ignore[misc]
        looked = built.compute(networks.part(few, index, count), backward=False)
        return weights(built), float(built.total(looked).loss_sum)

    alone = {form: trained(form, None) for form in FORMS}

    def work(group: Group) -> dict[str, list[float]]:
        found = {}
        for form, (expected, loss) in alone.items():
            mine, looked = trained(form, group)
            found[form] = [difference(mine, expected), abs(looked - loss)]
        return found

    found = members.run(3, work)  # of 2 samples to evaluate, one member has none
    assert max(max(values) for values in found.values()) <= 1e-9, found


def test_teams_that_cut_layers_evaluate_as_one_process_where_no_statistics_are_kept() -> None:
    def trained(comm: Group | None) -> tuple[dict[str, Tensor], float]:
        mesh = {} if comm is None else {"data": 2, "tensor": 2}
        plan: dict[str, Cut] = {"4": "columns", "6": "rows"}
        built = strategy(
            "single" if comm is None else "tensor",
            Task(two_layers_after_it, cross_entropy),
            parallel=Parallel(mesh=mesh, tensor=TensorSection(plan=plan)),
            comm=comm,
        )
        index, count, batch = built.shard.index, built.shard.count, images(1)
        steps(built, [networks.part(batch, index, count)] * 3)
        few: Batch = {name: column[:3] for name, column in batch.items()}  # type: ignore[misc]
        looked = built.compute(networks.part(few, index, count), backward=False)
        return built.state_dict()["model"], float(built.total(looked).loss_sum)

    expected, loss = trained(None)

    def work(group: Group) -> list[float]:
        mine, looked = trained(group)
        return [difference(mine, expected), abs(looked - loss)]

    assert max(members.run(4, work)) <= 1e-9


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_halves_are_as_precise_as_torchs_own(kind: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    x = (torch.randn(64, 4, 8, 8, generator=draw) + 30).to(kind)
    dy = torch.randn(64, 4, 8, 8, generator=draw).to(kind)

    def gradient(layer: nn.Module, dtype: torch.dtype) -> Tensor:
        leaf = x.to(dtype, copy=True).requires_grad_()
        layer(leaf).backward(dy.to(dtype))
        assert leaf.grad is not None
        return leaf.grad.double()

    exact = gradient(nn.BatchNorm2d(4).double(), torch.float64)
    theirs = gradient(nn.BatchNorm2d(4), kind)
    for layer in (nn.BatchNorm2d(4), nn.BatchNorm2d(4).to(kind)):
        synchronise(layer, Solo())
        error = (gradient(layer, kind) - exact).abs().max()
        assert error <= 1.1 * (theirs - exact).abs().max()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == layer.weight.dtype


def test_what_does_not_count_moves_nothing_and_has_no_gradient_of_others() -> None:
    layer = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    synchronise(layer, Solo())
    attend(layer, present=False)
    x = torch.randn(4, 3, requires_grad=True)
    (layer(x).sum() * 0).backward()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert x.grad is not None
    assert not x.grad.any()
    attend(layer, present=True)
    layer(x)
    assert int(layer.num_batches_tracked or 0) == 1
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        layer(x.view(4, 3, 1, 1))
    unsynchronise(layer)
    assert "forward" not in layer.__dict__
