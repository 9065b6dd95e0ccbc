"""Small parts that strategies share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.collectives import Solo
from echelon.core.errors import ConfigError
from echelon.strategy import half_precision as half
from echelon.strategy.all_reduce import make_alike
from echelon.strategy.diagnose import bad_layer


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


def test_a_layer_of_several_outputs_is_named_too() -> None:
    model = nn.Sequential(nn.LSTM(2, 2), nn.Identity())
    with torch.no_grad():
        model.get_parameter("0.weight_ih_l0").fill_(torch.nan)
    found = bad_layer(model, lambda m, b: m[0](b["x"]), {"x": torch.ones(3, 2)})  # type: ignore[index]
    assert found == "0"


def test_a_trial_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_child: int) -> int | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(half, "_awaited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        half._survives(torch.bfloat16)


def test_a_trial_that_takes_too_long_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "_DEADLINE", 0.0)
    assert not half._survives(torch.bfloat16)
