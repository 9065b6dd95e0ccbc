"""What no strategy trains on or with, and what each says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.core.errors import CheckpointError, NonFiniteError, TaskError
from echelon.core.interfaces import Task
from echelon.strategy import names

from .jobs import (
    CLASSES,
    FEATURES,
    batches,
    data,
    mlp,
    steps,
    strategy,
    task,
    weights,
)

pytestmark = pytest.mark.parametrize("name", names())


def test_a_non_finite_input_is_named_and_never_applied(name: str) -> None:
    trained = strategy(name)
    steps(trained, [batches(count=1)])
    before = weights(trained)
    bad = {key: column.clone() for key, column in data().items()}
    bad["x"][5, 2] = math.nan
    trained.compute([dict(bad)])
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is nan: input column 'x'"):
        trained.update()
    assert all(torch.equal(before[n], w) for n, w in weights(trained).items())
    steps(trained, [batches(count=1)])


def test_a_layer_that_gives_a_non_finite_output_is_named(name: str) -> None:
    trained = strategy(name)
    with torch.no_grad():
        next(iter(trained.model.children())).weight[0, 0] = math.nan  # type: ignore[operator]
    trained.compute(batches(count=1))
    with pytest.raises(NonFiniteError, match=r"step 1: the loss is nan: layer '0' first gave it"):
        trained.update()


def test_a_layer_with_a_non_finite_gradient_is_named(name: str) -> None:
    def root(output: torch.Tensor, _batch: object) -> tuple[torch.Tensor, float]:
        return (output - output.detach()).abs().sqrt().sum(), 1.0  # finite, its slope is not

    trained = strategy(name, Task(model=mlp, loss=root))
    trained.compute(batches(count=1))
    with pytest.raises(NonFiniteError, match=r"gradient of layer '0\.weight' is not finite"):
        trained.update()


def test_a_model_without_gradients_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="Linear has no parameter to train"):
        strategy(name, task(lambda: nn.Linear(2, 2).requires_grad_(False)))
    with pytest.raises(TaskError, match=r"must be a torch nn\.Module"):
        strategy(name, task(lambda: 3))  # type: ignore[arg-type,return-value]


def test_a_loss_that_ignores_the_model_is_refused(name: str) -> None:
    leaf = torch.ones((), requires_grad=True)
    trained = strategy(name, Task(model=mlp, loss=lambda _output, _batch: (leaf * 1.0, 1.0)))
    trained.compute(batches(count=1))
    with pytest.raises(TaskError, match="no parameter got a gradient"):
        trained.update()


def test_a_batch_without_weight_is_refused(name: str) -> None:
    trained = strategy(name, Task(model=mlp, loss=lambda output, _batch: (output.sum(), 0.0)))
    trained.compute(batches(count=1))
    with pytest.raises(TaskError, match="step 1: the loss gave its batch a weight of 0"):
        trained.update()


def test_a_checkpoint_of_another_model_is_refused(name: str) -> None:
    other = strategy(name, task(lambda: nn.Linear(FEATURES, CLASSES)))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        strategy(name).load_state_dict(other.state_dict())


def refused(name: str, model: Callable[[], nn.Module], loss: Any, words: str) -> None:
    trained = strategy(name, Task(model, loss))
    with pytest.raises(TaskError, match=words):
        steps(trained, [batches(count=1)])


def test_a_loss_that_is_no_pair_of_one_number_and_a_weight_is_refused(name: str) -> None:
    def each(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        return F.cross_entropy(output, batch["y"], reduction="none"), 1.0

    def detached(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        return each(output, batch)[0].sum().detach(), 1.0

    refused(name, mlp, lambda o, b: F.cross_entropy(o, b["y"]), r"gave a Tensor of shape \(\): it")
    refused(name, mlp, each, r"gave a Tensor of shape \(16,\) for its sum")
    refused(name, mlp, detached, "no parameter got a gradient")


def test_a_weight_that_is_not_finite_is_named(name: str) -> None:
    trained = strategy(name, Task(mlp, lambda output, _batch: (output.sum(), math.nan)))
    trained.compute(batches(count=1))
    with pytest.raises(NonFiniteError, match="step 1: the loss gave its batch a weight of nan"):
        trained.update()


def test_parameters_that_nobody_can_train_are_refused(name: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(TaskError, match="parameter 'inner' is complex64, which is not supported"):
        strategy(name, task(Complex))
    with pytest.raises(TaskError, match=r"parameter '0\.weight' has no shape yet"):
        strategy(name, task(lambda: nn.Sequential(nn.LazyLinear(2))))
    chosen = task(lambda: nn.Sequential(nn.EmbeddingBag(2, 2, sparse=True)))
    if name != "parameter_server":  # where a task's own optimizer is refused
        chosen.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(TaskError, match="layer '0' makes sparse gradients"):
        strategy(name, chosen)


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale(name: str) -> None:
    trained = strategy(name, precision="fp16")
    before = trained.state_dict()["scaler"]
    bad = {key: column.clone() for key, column in data().items()}
    bad["x"][5, 2] = math.nan
    trained.compute([dict(bad)])
    with pytest.raises(NonFiniteError, match="input column 'x' is not finite"):
        trained.update()
    assert trained.state_dict()["scaler"] == before


def test_a_layer_that_overflows_in_half_precision_only_is_named(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        large = nn.Linear(FEATURES, 4)
        with torch.no_grad():
            large.weight.fill_(6e4)
        return nn.Sequential(large, nn.Tanh(), nn.Linear(4, CLASSES), nn.Linear(CLASSES, CLASSES))

    def loss(output: torch.Tensor, _batch: object) -> tuple[torch.Tensor, float]:
        return output.log().sum(), 1.0  # not finite either way

    trained = strategy(name, Task(model, loss), precision="fp16")
    trained.compute(batches(count=1))
    with pytest.raises(NonFiniteError, match="layer '0' first gave it"):
        trained.update()


def test_a_buffer_that_the_model_replaces_is_put_back_after_a_refusal(name: str) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.mean: torch.Tensor
            self.register_buffer("mean", torch.zeros(FEATURES))
            self.scale = nn.Parameter(torch.ones(FEATURES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return (x - self.mean) * self.scale

    def model() -> nn.Module:
        centred = Centred()
        return nn.Sequential(centred, nn.Linear(FEATURES, CLASSES))

    trained = strategy(name, task(model))
    steps(trained, [batches(count=1)])
    before = weights(trained)
    assert before["0.mean"].any()
    bad = {key: column * (math.nan if key == "x" else 1) for key, column in data().items()}
    trained.compute([dict(bad)])
    with pytest.raises(NonFiniteError):
        trained.update()
    assert torch.equal(weights(trained)["0.mean"], before["0.mean"])
    steps(trained, [batches(count=1)])
