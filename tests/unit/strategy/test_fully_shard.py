"""Which parts of a model torch's `fully_shard` divides, and which it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon import cross_entropy
from echelon.core.errors import TaskError
from echelon.core.interfaces import Task
from echelon.models.gpt import GPT, GPTOptions
from echelon.strategy.sharded.fsdp import _check_divisible, first_samples, units, used_outside
from echelon.task import prepare


def network() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Conv2d(2, 3, 3)
    first.weight.data = first.weight.data.to(memory_format=torch.channels_last)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(27, 5), nn.Linear(5, 1))


def test_tied_parameters_stay_with_the_model_and_large_layers_are_gathered_by_themselves() -> None:
    options = GPTOptions(layers=2, heads=2, width=1024)
    with torch.device("meta"):
        model = GPT(16, 8, options)
        model[-1].scores.weight = model[0].tokens.weight  # type: ignore[union-attr]
    names = {module: name for name, module in model.named_modules()}
    found = [names[unit] for unit in units(model)]
    block = ["attention.qkv", "attention", "mlp.up", "mlp.out", "mlp", ""]
    assert found == [f"{at}.{part}".rstrip(".") for at in (1, 2) for part in block]


def test_layers_outside_of_repeated_parts_are_gathered_by_themselves_if_large() -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        inner = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(8)})
        model = nn.ModuleDict({"table": nn.Embedding(1 << 18, 8), "inner": inner})
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in units(model)] == ["table", "inner.layers.0", "inner.layers.1"]


def test_parts_whose_weights_are_used_while_they_are_not_called_are_found() -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("called", "asked", "read", "idle")})
    model["draws"] = nn.Dropout(0.5)
    model.train()
    before = torch.random.get_rng_state()

    def go() -> None:
        x = model["called"](torch.ones(1, 4)).to(model["asked"].weight.dtype)
        torch.nn.functional.linear(model["draws"](x), weight=model.get_parameter("read.weight"))
        assert not model.training

    assert used_outside(model, list(model.values()), go) == {model["read"]}
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_samples_to_try_come_as_the_model_will_get_them() -> None:
    device = torch.device("cpu")
    assert first_samples(Task(network, cross_entropy), device) is None
    columns = {"x": torch.arange(6.0).view(3, 2)}
    task = prepare(Task(network, cross_entropy, train=columns))
    task.augment = lambda batch, draws: {**batch, "drawn": draws.uniform(0)}
    found = first_samples(task, device)
    assert found is not None
    assert torch.equal(found["x"], columns["x"][:2])  # type: ignore[arg-type]
    assert len(found["drawn"]) == 2


def test_what_torch_cannot_divide_is_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(TaskError, match=r"'0\.weight' and '1\.weight' are of different kinds"):
        _check_divisible(mixed, [mixed])
    _check_divisible(mixed, [mixed[0], mixed[1], mixed])
    mixed[1].requires_grad_(False)
    _check_divisible(mixed, [mixed])
    mixed.register_parameter("none", nn.Parameter(torch.zeros(0, 2)))
    with pytest.raises(TaskError, match="parameter 'none' is empty"):
        _check_divisible(mixed, [mixed])
