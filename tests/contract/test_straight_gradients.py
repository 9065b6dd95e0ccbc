"""Gradients that are computed straight into the servers' memory are those autograd would copy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from echelon.core.config import ClipSection, OptimizerSection, ParameterServerSection
from echelon.core.types import Parallel
from echelon.strategy import all_reduce
from echelon.strategy.parameter_server import gradients
from echelon.strategy.parameter_server.gradients import bend_back, straighten

from . import networks, trained
from .jobs import difference, strategy
from .serving import Served, run

pytestmark = pytest.mark.timeout(300)
ADAMW = OptimizerSection(name="adamw", lr=1e-2, eps=1e-5, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LEAST", 1)
    monkeypatch.setattr(all_reduce, "EARLY", 0)


class Uses(nn.Module):
    """A layer that is used once, one twice, a tied weight, and one that others look at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.once, self.twice = nn.Linear(6, 8), nn.Linear(8, 8, bias=False)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.seen, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.once(x)).unsqueeze(1).expand(-1, 2, -1)
        x = self.twice(torch.tanh(self.twice(x)))
        x = self.other(torch.tanh(self.one(x)))
        x = torch.tanh(self.seen(x)) + F.linear(x, self.seen.weight).cos()
        return self.head(x.mean(1))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return self.head(checkpoint(self.second, x, use_reentrant=False))


class Penalised(nn.Module):
    """Differentiates its own gradient: the loss depends on a slope."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out: Tensor = self.head(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().mean(1, keepdim=True)


class Equilibrium(nn.Module):
    """Asks for gradients of its own while backward is under way, of an input and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.cell, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        z = torch.tanh(self.cell(x))
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = torch.tanh(self.cell(start))
            z.register_hook(lambda grad: self._solved(start, again, grad))
        return self.head(z)

    def _solved(self, start: Tensor, again: Tensor, grad: Tensor) -> Tensor:
        wanted = (start, self.cell.weight)
        through, slope = torch.autograd.grad(again, wanted, grad, retain_graph=True)
        assert slope.any()
        return grad + 0.5 * through


class Watched(nn.Module):
    """Has hooks on its weights that change their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.first.weight.register_hook(lambda grad: grad * torch.eye(8, 6))
        self.second.weight.register_post_accumulate_grad_hook(_halve)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad *= 0.5


class InPlace(nn.Module):
    """Changes what its layers return, of more than two dimensions; names the argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x.view(len(x), 1, -1)), inplace=True)
        return self.head(F.relu(self.second(input=x), inplace=True)).squeeze(1)


class Copied(nn.Module):
    """Computes a part with copies of itself, and saves itself, while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        file = io.BytesIO()
        torch.save(self.first, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        copied = copy.deepcopy(self.first)
        return self.head(torch.tanh(self.first(x)) + copied(x).cos() + saved(x).sin())


def through(
    model: Callable[[], nn.Module], comm: Served | None, micro: int, **numerics: Any
) -> tuple[dict[str, Tensor], int]:
    """Weights after a few updates, and how many gradients were born in place."""
    task = networks.task("mlp")
    task.model = model
    name = "single" if comm is None else "parameter_server"
    section = ParameterServerSection(plane="memory")
    built: Any = strategy(
        name, task, optimizer=ADAMW, micro=micro, comm=comm, parallel=Parallel(servers=section),
        clip=ClipSection(norm=0.05), **numerics,
    )  # fmt: skip
    written: list[int] = []
    if comm is not None:
        built._sum.written = counted(built._sum.written, written)
    index, parts = (0, 1) if comm is None else (comm.index, comm.count)
    for batch in networks.batches("mlp")[:8]:
        built.compute(networks.part(batch, index, parts, micro))
        assert built.update().committed
    return trained.weights(built), len(written)


def counted(inner: Callable[[int], None], seen: list[int]) -> Callable[[int], None]:
    def outer(at: int) -> None:
        seen.append(at)
        inner(at)

    return outer


@pytest.mark.parametrize(
    ("model", "micro", "least"),
    [
        (Uses, 1, 8),
        (Uses, 3, 0),
        (Recomputed, 1, 8 * 3),
        (Penalised, 1, 8),
        (Equilibrium, 1, 8 * 3),
        (Watched, 1, 8),
        (InPlace, 1, 8 * 3),
        (Copied, 1, 8 * 2),
    ],
)
def test_weights_are_those_of_one_process(
    model: Callable[[], nn.Module], micro: int, least: int
) -> None:
    expected, _ = through(model, None, micro)

    def work(group: Served) -> tuple[float, int]:
        mine, written = through(model, group, micro)
        return difference(mine, expected), written

    apart, written = run(2, 2, work)
    assert apart <= 1e-5
    assert written >= least


def test_layers_are_given_back_as_they_came() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    straighten(model, list(model.parameters()), lambda _: None, lambda _: None)
    assert all("forward" in vars(layer) for layer in model)
    bend_back(model)
    assert not any("forward" in vars(layer) for layer in model)


@pytest.mark.parametrize("how", ["evaluated", "frozen", "autocast", "mapped", "dual", "exchanged"])
def test_what_is_not_plain_training_goes_the_usual_way(how: str) -> None:
    model, asked = nn.Linear(3, 2), []
    straighten(model, list(model.parameters()), lambda at: asked.append(at), lambda _: None)
    x = torch.randn(4, 3)
    if how == "evaluated":
        with torch.inference_mode():
            found = model(x)
    elif how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
        found.sum().backward()
    elif how == "dual":
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).primal
        found.sum().backward()
    elif how == "mapped":
        found = torch.vmap(model)(x)
        found.sum().backward()
    else:
        model.weight = nn.Parameter(model.weight.clone(), requires_grad=how == "exchanged")
        found = model(x)
        found.sum().backward()
    expected = F.linear(x, model.weight, model.bias)
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.1)
    assert not asked


def test_gradients_are_asked_for_in_backward_only() -> None:
    model, asked = nn.Linear(3, 2), []
    straighten(model, list(model.parameters()), lambda at: asked.append(at), lambda _: None)
    out = model(torch.randn(4, 5, 3))
    assert asked == []
    out.sum().backward()
    assert asked == [0]
    assert model.weight.grad is not None  # there was no slot for it
