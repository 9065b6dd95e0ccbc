"""The layers that models share."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import TaskError
from echelon.core.types import Sparse
from echelon.models.layers import (
    ActivationName,
    BatchNorm1d,
    BatchNorm2d,
    Images,
    InitName,
    NormName,
    SparseLinear,
    activation,
    chain,
    dense_block,
    dropout,
    initialise_,
    norm,
)


def test_activations_do_what_their_names_say() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    expected = {
        "relu": x.clamp(min=0),
        "leaky_relu": torch.tensor([-0.01, 0.0, 2.0]),
        "gelu": 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "tanh": x.tanh(),
        "sigmoid": 1 / (1 + (-x).exp()),
    }
    assert expected.keys() == set(get_args(ActivationName))
    for name in get_args(ActivationName):
        torch.testing.assert_close(activation(name)(x), expected[name])


@pytest.mark.parametrize(
    ("name", "images", "shape", "over"),
    [
        ("batch", False, (64, 5), (0,)),
        ("layer", False, (64, 5), (1,)),
        ("batch", True, (16, 5, 4, 4), (0, 2, 3)),
        ("layer", True, (16, 5, 4, 4), (1, 2, 3)),
    ],
)
def test_batch_norm_is_over_the_batch_and_layer_norm_over_the_sample(
    name: NormName, images: bool, shape: tuple[int, ...], over: tuple[int, ...]
) -> None:
    made = norm(name, 5, images=images)
    assert made is not None
    y = made(torch.randn(shape) * 3 + 2)
    assert y.mean(over).abs().max().item() < 1e-5
    assert (y.std(over, correction=0) - 1).abs().max().item() < 1e-3


def test_no_norm_is_none() -> None:
    assert norm("none", 5) is None


@pytest.mark.parametrize(
    ("made", "shape"), [(BatchNorm1d(3), (1, 3)), (BatchNorm2d(3), (1, 3, 1, 1))]
)
def test_batch_norm_takes_a_batch_of_one(made: nn.Module, shape: tuple[int, ...]) -> None:
    lone = torch.randn(shape)
    made.train()
    made(torch.randn(8, *shape[1:]) * 2 + 1)
    figures = {name: value.clone() for name, value in made.named_buffers()}
    trained = made(lone)
    torch.testing.assert_close(trained, made.eval()(lone))
    for name, value in made.named_buffers():
        assert torch.equal(value, figures[name]), f"{name} was changed by a lone sample"


def test_dense_block_has_the_parts_asked_for_in_order() -> None:
    block = dense_block(3, 4, "tanh", "batch", 0.5)
    assert [type(part) for part in block] == [nn.Linear, BatchNorm1d, nn.Tanh, nn.Dropout]
    assert block[0].bias is None, "batch norm has its own"
    plain = dense_block(3, 4, "relu", "none", 0.0)
    assert [type(part) for part in plain] == [nn.Linear, nn.ReLU]
    assert plain[0].bias is not None


def test_chain_leaves_out_what_is_not_there() -> None:
    assert len(chain(nn.ReLU(), None, dropout(0.0), dropout(0.1))) == 2


WIDE = 400


def drawn(
    name: InitName,
    act: ActivationName = "relu",
    kind: type[nn.Linear] | type[SparseLinear] = nn.Linear,
) -> Tensor:
    layer = kind(WIDE, 300)
    initialise_(nn.Sequential(layer), name, act)
    assert layer.bias is not None
    assert bool((layer.bias == 0).all()), "biases start at 0"
    return layer.weight.detach()


@pytest.mark.parametrize(
    ("name", "act", "std"),
    [
        ("he", "relu", math.sqrt(2 / WIDE)),
        ("he", "gelu", math.sqrt(2 / WIDE)),
        ("he", "leaky_relu", math.sqrt(2 / (1 + 0.01**2) / WIDE)),
        ("he", "tanh", 5 / 3 / math.sqrt(WIDE)),
        ("he", "sigmoid", 1 / math.sqrt(WIDE)),
        ("xavier", "relu", math.sqrt(2 / (WIDE + 300))),
        ("orthogonal", "sigmoid", 1 / math.sqrt(WIDE)),
        ("normal", "relu", 0.02),
    ],
)
def test_initial_weights_have_the_spread_of_their_rule(
    name: InitName, act: ActivationName, std: float
) -> None:
    weight = drawn(name, act)
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert weight.mean().item() == pytest.approx(0.0, abs=std / 50)


def test_xavier_is_uniform_within_its_bound() -> None:
    bound = math.sqrt(6 / (WIDE + 300))
    assert drawn("xavier").abs().max().item() == pytest.approx(bound, rel=1e-3)


def test_orthogonal_rows_are_orthogonal() -> None:
    weight = drawn("orthogonal", "relu")
    torch.testing.assert_close(weight @ weight.t(), 2 * torch.eye(300), atol=1e-4, rtol=0)


def test_a_sparse_layer_is_drawn_like_a_linear_one() -> None:
    weight = drawn("he", kind=SparseLinear)
    assert weight.shape == (WIDE, 300)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / WIDE), rel=0.02)


def test_default_leaves_torchs_own_draw() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    initialise_(layer, "default")
    assert torch.equal(layer.weight, before)
    assert bool((layer.bias != 0).all())


def test_convolutions_are_drawn_and_norms_are_not() -> None:
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Conv1d(64, 64, 5))
    initialise_(model, "he")
    for index, fan in ((0, 16 * 9), (2, 64 * 5)):
        weight = model[index].weight
        assert isinstance(weight, Tensor)
        assert weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.05)
    assert bool((model.get_parameter("1.weight") == 1).all())


def test_images_get_a_channel_and_lie_channels_last() -> None:
    grey, colour = Images()(torch.rand(2, 5, 6)), Images()(torch.rand(2, 3, 5, 6))
    assert (grey.shape, colour.shape) == ((2, 1, 5, 6), (2, 3, 5, 6))
    assert colour.is_contiguous(memory_format=torch.channels_last)
    assert grey.stride(1) == 1


def rows() -> tuple[Sparse, Tensor]:
    """Three sparse rows, the second one empty, and the same as a matrix."""
    indices, values = torch.tensor([0, 4, 2, 4]), torch.tensor([1.0, -2.0, 0.5, 3.0])
    dense = torch.tensor([[1.0, 0, 0, 0, -2], [0, 0, 0, 0, 0], [0, 0, 0.5, 0, 3]])
    return Sparse(indices, values, torch.tensor([0, 2, 2, 4]), 5), dense


@pytest.mark.parametrize("bias", [True, False])
def test_sparse_rows_give_what_dense_ones_do(bias: bool) -> None:
    sparse, dense = rows()
    layer = SparseLinear(5, 7, bias=bias)
    reference = nn.Linear(5, 7, bias=bias)
    with torch.no_grad():
        reference.weight.copy_(layer.weight.t())
        if layer.bias is not None:
            reference.bias.copy_(layer.bias)
    torch.testing.assert_close(layer(sparse), reference(dense))
    torch.testing.assert_close(layer(dense), reference(dense))
    torch.autograd.backward(layer(sparse).square().sum())
    torch.autograd.backward(reference(dense).square().sum())
    assert reference.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad.t())


def test_sparse_values_of_another_precision_are_taken() -> None:
    sparse, dense = rows()
    layer = SparseLinear(5, 2)
    doubled = sparse._replace(values=sparse.values.double())
    torch.testing.assert_close(layer(doubled), layer(dense))


def test_sparse_rows_of_another_width_are_refused() -> None:
    sparse, _ = rows()
    with pytest.raises(TaskError, match="sparse rows are 5 wide, but the model takes 6"):
        SparseLinear(6, 2)(sparse)
