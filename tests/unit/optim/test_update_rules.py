"""Every optimizer against its formula, and against torch's own step, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.config import OptimizerSection
from echelon.optim import Stepper, build_optimizer

NAMES = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"]
PENALTIES: list[dict[str, float]] = [
    {},
    {"l1": 0.01},
    {"l2": 0.1},
    {"weight_decay": 0.1},
    {"l1": 0.01, "l2": 0.1, "weight_decay": 0.1},
]
FACTORS = [0.5, 1.0, 1.0, 0.25, 1.0, 0.5]


@dataclass
class Reference:
    """An update rule as its paper writes it, for one parameter, in plain arithmetic."""

    section: OptimizerSection
    t: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    def step(self, w: Tensor, gradient: Tensor, lr: float) -> Tensor:
        s = self.section
        g = gradient + s.l2 * w + s.l1 * torch.sign(w)
        w = w - lr * s.weight_decay * w
        self.t += 1
        return w - lr * self._direction(g)

    def _direction(self, g: Tensor) -> Tensor:
        s, zero = self.section, torch.zeros_like(g)
        m, v = self.kept.get("m", zero), self.kept.get("v", zero)
        if s.name == "sgd":
            return g
        if s.name in ("momentum", "nesterov"):
            mu = 0.9 if s.momentum is None else s.momentum
            self.kept["m"] = m = mu * m + g
            return g + mu * m if s.name == "nesterov" else m
        if s.name == "adagrad":
            self.kept["v"] = v = v + g * g
            return g / (v.sqrt() + 1e-10)
        if s.name == "rmsprop":
            self.kept["v"] = v = 0.99 * v + 0.01 * g * g
            self.kept["m"] = m = (s.momentum or 0.0) * m + g / (v.sqrt() + 1e-8)
            return m
        beta1, beta2 = s.betas or (0.9, 0.999)
        self.kept["m"] = m = beta1 * m + (1 - beta1) * g
        self.kept["v"] = v = beta2 * v + (1 - beta2) * g * g
        return (m / (1 - beta1**self.t)) / ((v / (1 - beta2**self.t)).sqrt() + 1e-8)


def section(name: str, **values: Any) -> OptimizerSection:
    return OptimizerSection.model_validate({"name": name, "lr": 0.05, "decay": "all", **values})


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], None]]:
    """A small model, and a function that gives it the gradients of the next batch."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)

    def backward() -> None:
        x = torch.randn(16, 5, generator=generator, dtype=dtype)
        model.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2].sin())
        torch.autograd.backward(loss)

    return model, backward


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize("name", NAMES)
def test_steps_follow_the_formula(name: str, penalties: dict[str, float]) -> None:
    chosen = section(name, **penalties)
    model, backward = problem()
    stepper = Stepper(build_optimizer(chosen, model), model.named_parameters())
    expected = [p.detach().clone() for p in model.parameters()]
    rules = [Reference(chosen) for _ in expected]
    for factor in FACTORS:
        backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        stepper.step(factor)
        for i, rule in enumerate(rules):
            expected[i] = rule.step(expected[i], gradients[i], chosen.lr * factor)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["rmsprop", "momentum", "nesterov"])
def test_momentum_follows_the_formula(name: str) -> None:
    test_steps_follow_the_formula(name, {"momentum": 0.7})


def test_betas_follow_the_formula() -> None:
    test_steps_follow_the_formula("adam", {"betas": (0.6, 0.7)})  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_torchs_own_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    ours, ours_backward = problem(dtype)
    theirs, theirs_backward = problem(dtype)
    penalty = {"weight_decay" if name == "adamw" else "l2": 0.01}  # what torch applies itself
    stepper = Stepper(build_optimizer(section(name, **penalty), ours), ours.named_parameters())
    optimizer = build_optimizer(section(name, **penalty), theirs)
    for factor in FACTORS:
        ours_backward()
        stepper.step(factor)
        theirs_backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor
        optimizer.step()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_penalties_leave_biases_alone_unless_asked() -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    before = model.bias.detach().clone()
    chosen = section("sgd", weight_decay=0.5, l1=0.5, l2=0.5, decay="matrices")
    stepper = Stepper(build_optimizer(chosen, model), model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    stepper.step(1.0)
    assert torch.equal(model.bias.detach(), before)
    shrunk = 1 - 0.05 * (0.5 + 0.5 + 0.5)
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), shrunk))
