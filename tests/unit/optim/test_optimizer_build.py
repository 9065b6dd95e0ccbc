"""An optimizer section becomes the torch optimizer it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.config import OptimizerSection
from echelon.core.errors import TaskError
from echelon.optim import build_optimizer


def section(**values: Any) -> OptimizerSection:
    return OptimizerSection.model_validate(values)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0, "nesterov": False, "fused": True}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9, "nesterov": False, "fused": True}),
        ("nesterov", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
        ("adagrad", torch.optim.Adagrad, {"eps": 1e-10, "fused": True}),
        ("rmsprop", torch.optim.RMSprop, {"eps": 1e-8, "momentum": 0.0, "foreach": True}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8, "fused": True}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8, "fused": True}),
    ],
)
def test_each_name_has_its_optimizer_and_defaults(
    name: str, kind: type, options: dict[str, Any]
) -> None:
    optimizer = build_optimizer(section(name=name, lr=0.25), model())
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.25
    assert {key: group[key] for key in options} == options


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "momentum", "momentum": 0.5}, {"momentum": 0.5}),
        ({"name": "momentum", "momentum": 0.0}, {"momentum": 0.0}),
        ({"name": "nesterov", "momentum": 0.0}, {"momentum": 0.0, "nesterov": False}),
        ({"name": "rmsprop", "momentum": 0.5, "eps": 1e-3}, {"momentum": 0.5, "eps": 1e-3}),
        ({"name": "adam", "betas": (0.5, 0.6), "eps": 1e-3}, {"betas": (0.5, 0.6), "eps": 1e-3}),
        ({"name": "adagrad", "eps": 1e-3}, {"eps": 1e-3}),
    ],
)
def test_options_reach_the_optimizer(values: dict[str, Any], expected: dict[str, Any]) -> None:
    (group,) = build_optimizer(section(**values), model()).param_groups
    assert {key: group[key] for key in expected} == expected


def test_only_matrices_are_penalised_unless_all_are_asked_for() -> None:
    net = model()
    decayed, free = build_optimizer(section(weight_decay=0.1), net).param_groups
    assert [p.ndim for p in decayed["params"]] == [2, 2]
    assert [p.ndim for p in free["params"]] == [1, 1, 1]
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    (everything,) = build_optimizer(section(weight_decay=0.1, decay="all"), net).param_groups
    assert len(everything["params"]) == 5


def test_without_penalty_or_without_vectors_one_group_is_enough() -> None:
    assert len(build_optimizer(section(), model()).param_groups) == 1
    matrices = nn.Linear(3, 2, bias=False)
    assert len(build_optimizer(section(l1=0.1), matrices).param_groups) == 1


@pytest.mark.parametrize(
    ("values", "torch_decay", "l2", "decay"),
    [
        ({"name": "sgd", "l2": 0.1}, 0.1, 0.0, 0.0),
        ({"name": "sgd", "weight_decay": 0.2}, 0.0, 0.0, 0.2),
        ({"name": "adam", "l2": 0.1, "weight_decay": 0.2}, 0.0, 0.1, 0.2),
        ({"name": "adamw", "l2": 0.1, "weight_decay": 0.2}, 0.2, 0.1, 0.0),
    ],
)
def test_penalties_are_split_between_the_kernel_and_the_stepper(
    values: dict[str, Any], torch_decay: float, l2: float, decay: float
) -> None:
    group = build_optimizer(section(**values), nn.Linear(2, 2)).param_groups[0]
    assert (group["weight_decay"], group["l2"], group["decay"]) == (torch_decay, l2, decay)


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    next(net.parameters()).requires_grad_(False)
    (group,) = build_optimizer(section(), net).param_groups
    assert len(group["params"]) == 4


def test_no_fused_kernel_is_asked_for_where_there_is_none() -> None:
    (group,) = build_optimizer(section(name="adam"), nn.Linear(2, 2, device="meta")).param_groups
    assert group["fused"] is False


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match="no parameter to train"):
        build_optimizer(section(), nn.ReLU())


def test_sparse_gradients_are_refused_by_the_layers_name() -> None:
    net = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(TaskError, match=r"layer '0' makes sparse gradients.*sparse=False"):
        build_optimizer(section(), net)
