"""All members begin with the first one's weights, except those that `skip_init` names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from echelon.comm.collectives import Solo
from echelon.core.errors import ConfigError
from echelon.strategy.all_reduce import make_alike


class Told(Solo):
    """Remembers what is copied."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:  # noqa: ARG002
        self.sizes = [tensor.numel() for tensor in tensors]


def test_a_tied_parameter_is_left_out_by_any_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    # 7 in all: the tied weight, a bias, and batch norm's weight, bias, mean, var and count
    for skip, copied in {"0.weight": 6, "1.weight": 6, "1.*": 5, "*": 0}.items():
        told = Told()
        make_alike(model, told, [skip])
        assert len(told.sizes) == copied
    with pytest.raises(ConfigError, match=r"parameter '2\.weihgt' is unknown; did you mean"):
        make_alike(model, Told(), ["2.weihgt"])
