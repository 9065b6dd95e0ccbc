"""Random numbers belong to samples: the same on every worker and in every batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.data.augment import OwnDraws
from echelon.data.loader import PositionDraws

POSITIONS = np.arange(1000, 101_000)


def uniform(draw: int = 0, *, seed: int = 1, epoch: int = 2) -> torch.Tensor:
    return PositionDraws(seed, epoch, POSITIONS).uniform(draw)


def test_a_draw_depends_on_its_position_alone() -> None:
    scattered = np.random.default_rng(0).permutation(len(POSITIONS))
    drawn = PositionDraws(1, 2, POSITIONS[scattered]).uniform(0)
    assert torch.equal(drawn, uniform()[scattered])
    assert torch.equal(PositionDraws(1, 2, POSITIONS[500:501]).uniform(0), uniform()[500:501])


def test_draws_are_even_in_the_unit_interval() -> None:
    drawn = uniform()
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * (2 * 99) ** 0.5


@pytest.mark.parametrize(
    "other", [uniform(1), uniform(seed=2), uniform(epoch=3), uniform().roll(1), uniform(2**40)]
)
def test_other_draws_seeds_epochs_and_positions_are_unrelated(other: torch.Tensor) -> None:
    correlation = torch.corrcoef(torch.stack([uniform(), other]))[0, 1]
    assert abs(correlation) < 5 / len(POSITIONS) ** 0.5


def test_draws_stay_what_they_were() -> None:
    """Augmentation after a resume relies on these never changing."""
    expected = [0.5193511843681335, 0.58469557762146, 0.09369981288909912]
    assert PositionDraws(3, 4, np.array([0, 5, 2**40])).uniform(6).tolist() == expected


def test_draws_go_to_the_device_of_the_batch() -> None:
    draws = PositionDraws(0, 0, POSITIONS, torch.device("meta"))
    assert draws.uniform(0).device.type == "meta"


def test_users_of_one_source_never_share_a_draw() -> None:
    class Names:
        """Return the index of the draw."""

        def uniform(self, draw: int) -> torch.Tensor:
            return torch.tensor(draw)

    outer = [OwnDraws(Names(), index, 3) for index in range(3)]
    inner = [OwnDraws(outer[1], index, 2) for index in range(2)]
    users = [outer[0], *inner, outer[2]]
    seen = [int(user.uniform(draw)) for user in users for draw in range(50)]
    assert len(set(seen)) == len(seen)
