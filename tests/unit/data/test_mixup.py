"""Mixup blends neighboring samples and records the share of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.core.errors import TaskError
from echelon.data.augment import Mixup, _beta
from echelon.data.loader import PositionDraws


def mixed(x: Tensor, y: Tensor, alpha: float = 0.4) -> dict[str, Tensor]:
    draws = PositionDraws(3, 0, np.arange(len(x)))
    result = Mixup(alpha)({"x": x, "y": y}, draws)
    assert all(isinstance(column, Tensor) for column in result.values())
    return result  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_classes_are_carried_beside_each_other(count: int) -> None:
    x, y = torch.randn(count, 3, 4), torch.arange(count)
    result = mixed(x, y)
    partner = [min(index ^ 1, count - 1) for index in range(count)]
    share = result["mix"]
    assert result["y"].tolist() == list(range(count))
    assert result["y2"].tolist() == partner
    expected = share.view(-1, 1, 1) * x + (1 - share.view(-1, 1, 1)) * x[partner]
    assert torch.allclose(result["x"], expected, atol=1e-6)


def test_the_loss_of_a_blend_remains_a_sum_and_a_weight() -> None:
    """For a linear score the loss of the blend lies between those of the two samples."""
    result = mixed(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    scores = torch.log_softmax(result["x"], 1)
    own = -scores.gather(1, result["y"][:, None])[:, 0]
    other = -scores.gather(1, result["y2"][:, None])[:, 0]
    soft = torch.zeros(6, 4).scatter_add_(1, result["y"][:, None], result["mix"][:, None])
    soft.scatter_add_(1, result["y2"][:, None], 1 - result["mix"][:, None])
    total = (result["mix"] * own + (1 - result["mix"]) * other).sum()
    assert torch.allclose(total, -(soft * scores).sum())


def test_targets_of_floats_are_blended() -> None:
    x = torch.randn(4, 3)
    result = mixed(x, x.sum(1))
    assert set(result) == {"x", "y"}
    assert torch.allclose(result["y"], result["x"].sum(1), atol=1e-5)


def test_bytes_stay_bytes() -> None:
    x = torch.randint(0, 256, (64, 5, 5), dtype=torch.uint8)
    result = mixed(x, torch.arange(64))
    share = result["mix"].view(-1, 1, 1)
    exact = share * x.float() + (1 - share) * x[torch.arange(64) ^ 1].float()
    assert result["x"].dtype == torch.uint8
    assert (result["x"].float() - exact).abs().max() <= 0.501


@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0, 3.0])
def test_shares_come_from_a_beta_distribution(alpha: float) -> None:
    """Checked by three moments: mean ½, variance 1/(4(2α + 1)), and the fourth."""
    draws = PositionDraws(0, 0, np.arange(200_000))
    share = _beta(alpha, draws.uniform(0), draws.uniform(1)).double()
    centred = share - 0.5
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = 3 * variance**2 * (2 * alpha + 1) / (2 * alpha + 3)
    assert share.min() >= 0
    assert share.max() <= 1
    assert abs(centred.mean()) < 5 * math.sqrt(variance / len(share))
    for power, expected in ((2, variance), (4, fourth)):
        values = centred**power
        assert abs(values.mean() - expected) < 5 * values.std() / math.sqrt(len(share))


def test_the_far_ends_of_the_draws_are_numbers_too() -> None:
    ends = torch.tensor([0.0, 1 - 2**-24, 0.25, 0.5])
    for alpha in (1e-3, 0.2, 50.0):
        share = _beta(alpha, ends.repeat_interleave(4), ends.repeat(4))
        assert bool(((share >= 0) & (share <= 1)).all())


def test_a_batch_without_a_target_is_refused() -> None:
    with pytest.raises(TaskError, match="column 'y' is needed and missing"):
        Mixup(0.2)({"x": torch.zeros(2, 2)}, PositionDraws(0, 0, np.arange(2)))
