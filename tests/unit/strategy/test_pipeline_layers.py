"""The layers of a model, found by watching it at work."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.comm import Solo
from echelon.core.config import PipelineSection
from echelon.core.errors import ConfigError, TaskError
from echelon.core.interfaces import Task, call_model
from echelon.core.types import Batch
from echelon.models.gpt import GPT, GPTOptions
from echelon.models.resnet import ResNet, ResNetOptions
from echelon.strategy.pipeline.partition import decide, entrance, find_layers, measure, traceless
from echelon.task import prepare

X = torch.randn(4, 3)


def layers(model: nn.Module, x: Any = X) -> list[str]:
    return find_layers(model, lambda whole: whole(x))


class Wrapped(nn.Module):
    """A chain by hand."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.second, self.first = second, first

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Join(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            for layer in self:
                x = layer(x)
        return x


def test_chains_in_chains_are_taken_apart_and_the_rest_is_not() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Residual()))
    assert layers(nn.Sequential(inner, nn.ReLU())) == ["0.0", "0.1.0", "0.1.1", "1"]
    assert layers(Wrapped(nn.Tanh(), nn.Sequential(nn.Linear(3, 2)))) == ["first", "second.0"]


def test_a_layer_may_come_by_twice_unless_it_counts() -> None:
    twice = layers(nn.Sequential(Twice(nn.Tanh(), nn.Linear(3, 3)), nn.ReLU()))
    assert twice == ["0.0", "0.1", "0.0", "0.1", "1"]
    assert layers(nn.Sequential(Twice(nn.BatchNorm1d(3)), nn.ReLU())) == ["0", "1"]


def test_what_does_more_than_pass_on_is_one_layer() -> None:
    patched = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    patched.forward = patched.forward  # type: ignore[method-assign]  # as recomputing does
    assert layers(nn.Sequential(patched, nn.ReLU())) == ["0", "1"]
    weighted = nn.Sequential(nn.Tanh())
    weighted.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert layers(nn.Sequential(weighted, nn.ReLU())) == ["0", "1"]


def test_built_in_models_are_chains_of_their_blocks() -> None:
    gpt = GPT(11, 5, GPTOptions(layers=2, heads=2, width=4))
    tokens = torch.randint(11, (2, 5))
    assert layers(gpt, tokens) == ["0", "1", "2", "3.norm", "3.scores"]
    resnet = ResNet((1, 8, 8), 3, ResNetOptions(depth=18))
    found = layers(resnet.eval(), torch.randn(1, 1, 8, 8))
    assert [name for name in found if name.count(".") == 0] == [
        str(n) for n in (0, *range(2, 10), 11)
    ]


def test_a_model_that_is_no_chain_is_refused() -> None:
    with pytest.raises(TaskError, match=r"chain of layers, .* as in nn\.Sequential: Residual is n"):
        layers(Residual())
    with pytest.raises(TaskError, match="is not"):
        layers(Twice(nn.BatchNorm1d(3)))
    with pytest.raises(TaskError, match=r"does not call the model itself, once"):
        find_layers(nn.Sequential(nn.Linear(3, 3)), lambda model: model[0](X))  # type: ignore[index]


def test_a_forward_may_choose_and_prepare_the_input() -> None:
    batch: Batch = {"x": X, "other": X + 1}
    assert entrance(call_model, batch) is X
    assert torch.equal(entrance(lambda m, b: m(b["other"] * 2), batch), (X + 1) * 2)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda m, b: m(b["x"]) * 2, "it fails where the model is not at hand"),
        (lambda m, b: m.head(b["x"]), "it fails where the model is not at hand"),
        (lambda m, b: (m(b["x"]),), "it changes what the model gives"),
        (lambda m, b: m(b["x"], b["x"]), "it calls the model with 2 values"),
        (lambda _m, b: b["x"], "it calls the model never"),
    ],
)
def test_a_forward_that_does_more_is_refused(forward: Any, why: str) -> None:
    with pytest.raises(TaskError, match=f"needs a task.forward that calls the model once.*{why}"):
        entrance(forward, {"x": X})


def test_costs_are_measured_forward_and_backward_where_layers_work() -> None:
    slow = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    chain = [nn.Linear(3, 256), slow, nn.Linear(256, 2), Pair(), Join()]
    found = measure(chain, X, contextlib.nullcontext)
    assert max(found, key=lambda cost: cost.seconds) is found[1]
    assert found[0].passing == pytest.approx(2 * 4 * 4 * 256 / 1e9)
    assert found[3].passing == float("inf")
    assert measure([nn.Embedding(5, 2)], torch.tensor([[1]]), contextlib.nullcontext)[0].seconds > 0


def test_trying_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = [buffer.clone() for buffer in model.buffers()]
    drawn = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    with traceless(model):
        model(X).sum().backward()
        random.random()
        np.random.rand()
    after = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    assert torch.equal(drawn[0], after[0])
    assert drawn[1:] == after[1:]
    assert all(map(torch.equal, model.buffers(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def decided(model: nn.Module, train: Any, *split: str, members: int = 2) -> list[tuple[str, ...]]:
    task = prepare(Task(model=model, loss=cross_entropy, train=train))
    section = PipelineSection(split=split)
    return decide(model, task, section, members, Solo(), contextlib.nullcontext, 4).stages


def test_stages_are_decided_on_by_split_or_cost() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    assert decided(model, {"x": X}, "1") == [("0",), ("1", "2")]
    heavy = nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 2), nn.Identity())
    assert sum(decided(heavy, {"x": X}), ()) == ("0", "1", "2")


def test_too_many_stages_and_missing_samples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with pytest.raises(ConfigError, match=r"3 stages are more than the 2 layers of Seq.* \(0, 1\)"):
        decided(model, {"x": X}, members=3)
    with pytest.raises(TaskError, match="tries the model on training samples: there are none"):
        decided(model, None)
