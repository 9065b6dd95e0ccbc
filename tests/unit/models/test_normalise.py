"""The first layer of a model: raw values in, values of mean 0 and deviation 1 out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from echelon.core.errors import TaskError
from echelon.models import Normalise


def test_bytes_become_floats_of_mean_0_and_deviation_1() -> None:
    x = torch.randint(0, 256, (64, 28, 28), dtype=torch.uint8)
    mean, std = x.double().mean(), x.double().std()
    y = Normalise(float(mean), float(std))(x)
    assert y.dtype == torch.float32
    assert y.mean().item() == pytest.approx(0, abs=1e-5)
    assert y.std().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16],
    ids=str,
)
def test_every_dtype_gives_float32_and_is_not_changed_itself(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 2], [4, 6]]).to(dtype)
    y = Normalise([2.0, 4.0], [2.0, 1.0])(x)
    assert y.dtype == torch.float32
    assert y.tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    assert torch.equal(x, torch.tensor([[0, 2], [4, 6]]).to(dtype))


def test_figures_per_channel_go_with_channels() -> None:
    x = torch.stack([torch.full((2, 2), 1.0), torch.full((2, 2), 10.0)]).expand(3, 2, 2, 2)
    y = Normalise([1.0, 4.0], [1.0, 2.0])(x)
    assert y[:, 0].unique().tolist() == [0.0]
    assert y[:, 1].unique().tolist() == [3.0]


def test_one_figure_goes_with_everything() -> None:
    for shape in [(2, 3), (2, 3, 3), (2, 3, 4, 4)]:
        assert Normalise(1.0, 2.0)(torch.full(shape, 5.0)).unique().tolist() == [2.0]
    assert Normalise([1.0, 2.0], 2.0)(torch.tensor([[5.0, 5.0]])).tolist() == [[2.0, 1.5]]
    assert Normalise(1.0, [1.0, 2.0])(torch.tensor([[5.0, 5.0]])).tolist() == [[4.0, 2.0]]


def test_a_missing_value_becomes_the_mean_and_an_infinite_one_stays() -> None:
    y = Normalise([1.0, 5.0, 0.0, 0.0], [1.0, 2.0, 1.0, 1.0])(
        torch.tensor([[math.nan, math.nan, math.inf, -math.inf]])
    )
    assert y.tolist() == [[0.0, 0.0, math.inf, -math.inf]]


def test_a_feature_that_never_changes_is_only_centred() -> None:
    assert Normalise([3.0, 0.0], [0.0, 1.0])(torch.tensor([[3.0, 2.0]])).tolist() == [[0.0, 2.0]]


def test_a_large_mean_does_not_cost_precision() -> None:
    x = 1_000_000.0 + torch.tensor([[-0.25], [0.25]], dtype=torch.float64)
    assert Normalise([1_000_000.0], [0.25])(x).tolist() == [[-1.0], [1.0]]


def test_without_figures_it_only_makes_floats() -> None:
    x = torch.randint(0, 256, (4, 3), dtype=torch.uint8)
    assert torch.equal(Normalise(0.0, 1.0)(x), x.float())


def test_under_autocast_it_gives_what_autocast_computes_in() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Normalise(0.0, 1.0)(torch.ones(2, 3)).dtype == torch.bfloat16


def test_figures_are_saved_with_the_model() -> None:
    first, second = Normalise([1.0, 2.0], [3.0, 4.0]), Normalise([0.0, 0.0], [1.0, 1.0])
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 2)
    assert torch.equal(first(x), second(x))
    assert list(first.parameters()) == []


def test_no_gradient_flows_into_raw_inputs_unless_wanted() -> None:
    assert not Normalise(0.0, 1.0)(torch.ones(2, 3)).requires_grad
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.backward(Normalise(0.0, 4.0)(x).sum())
    assert x.grad is not None
    assert x.grad.unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (math.nan, 1.0, "mean must be a finite number"),
        (0.0, [1.0, math.inf], "std must be a finite number"),
        ([[0.0]], 1.0, "mean must be a finite number, or one per channel"),
        (0.0, [1.0, -2.0], "std is negative: -2"),
        ([0.0, 0.0], [1.0, 1.0, 1.0], "2 means and 3 deviations do not go together"),
    ],
)
def test_figures_without_sense_are_refused(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Normalise(mean, std)


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4, 3)])
def test_figures_that_do_not_fit_the_samples_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TaskError, match="3 means do not fit samples of"):
        Normalise([0.0] * 3, 1.0)(torch.zeros(shape))
