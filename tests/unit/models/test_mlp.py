"""Softmax regression and the multi-layer perceptron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.core.types import Sparse
from echelon.models.layers import BatchNorm1d, SparseLinear
from echelon.models.mlp import MLP, MLPOptions
from echelon.models.softmax import Softmax, SoftmaxOptions


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def mlp(shape: tuple[int, ...] = (30,), outputs: int = 2, **values: Any) -> MLP:
    return MLP(shape, outputs, MLPOptions.model_validate(values))


@pytest.mark.parametrize(
    ("shape", "count"), [((30,), 30 * 2 + 2), ((28, 28), 784 * 2 + 2), ((3, 4, 5), 60 * 2 + 2)]
)
def test_softmax_is_one_linear_layer_over_any_shape(shape: tuple[int, ...], count: int) -> None:
    model = Softmax(shape, 2, SoftmaxOptions())
    assert parameters(model) == count
    assert model(torch.randn(5, *shape)).shape == (5, 2)
    assert parameters(Softmax(shape, 2, SoftmaxOptions(bias=False))) == count - 2


def test_softmax_is_linear() -> None:
    model = Softmax((6,), 3, SoftmaxOptions(bias=False))
    x, y = torch.randn(2, 4, 6)
    torch.testing.assert_close(model(2 * x - y), 2 * model(x) - model(y))


def test_the_usual_mlp_has_the_known_size() -> None:
    assert parameters(mlp()) == 30 * 64 + 64 + 64 * 2 + 2
    assert parameters(mlp((28, 28), 10, hidden=(512, 512))) == 669_706


@pytest.mark.parametrize("shape", [(30,), (4, 5), (3, 8, 8)])
def test_it_takes_vectors_and_images(shape: tuple[int, ...]) -> None:
    assert mlp(shape, 7)(torch.randn(5, *shape)).shape == (5, 7)


def test_each_hidden_layer_is_a_block() -> None:
    model = mlp(hidden=(8, 9), norm="batch", dropout=0.5, activation="gelu")
    *blocks, head = model
    assert [[type(part) for part in block] for block in blocks] == [  # type: ignore[attr-defined]
        [nn.Linear, BatchNorm1d, nn.GELU, nn.Dropout]
    ] * 2
    assert isinstance(head, nn.Linear)
    x = torch.randn(3, 30)
    model.eval()
    by_blocks = x
    for block in model:
        by_blocks = block(by_blocks)
    assert torch.equal(by_blocks, model(x))


def test_dropout_is_off_in_evaluation() -> None:
    model, x = mlp(dropout=0.5), torch.randn(4, 30)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("init", ["he", "xavier", "orthogonal", "normal", "default"])
def test_initial_scores_are_of_moderate_size(norm: str, init: str) -> None:
    model = mlp((50,), 10, hidden=(256, 256), norm=norm, init=init)
    assert model(torch.randn(64, 50)).std().item() < 3


def test_he_keeps_the_spread_from_layer_to_layer() -> None:
    x = torch.randn(256, 200)
    deep = mlp((200,), 10, hidden=(200,) * 10, init="he")
    small = mlp((200,), 10, hidden=(200,) * 10, init="normal")
    assert 0.3 < nn.Sequential(*list(deep)[:-1])(x).square().mean().sqrt().item() < 3
    assert nn.Sequential(*list(small)[:-1])(x).square().mean().sqrt().item() < 1e-3


def sparse(x: Tensor) -> Sparse:
    counts = (x != 0).sum(1).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts])
    return Sparse(x.nonzero()[:, 1], x[x != 0], offsets, x.shape[1])


@pytest.mark.parametrize("family", ["softmax", "mlp"])
def test_sparse_rows_give_what_dense_ones_do(family: str) -> None:
    torch.manual_seed(0)
    model: nn.Module
    if family == "mlp":
        model = MLP((40,), 3, MLPOptions(hidden=(8,)), sparse=True)
    else:
        model = Softmax((40,), 3, SoftmaxOptions(), sparse=True)
    assert any(isinstance(part, SparseLinear) for part in model.modules())
    x = torch.randn(6, 40) * (torch.rand(6, 40) < 0.2)
    torch.testing.assert_close(model(sparse(x)), model(x))
