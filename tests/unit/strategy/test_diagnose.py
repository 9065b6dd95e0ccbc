"""The layer that first gave a non-finite number is named."""

from __future__ import annotations

import torch
from torch import nn

from echelon.strategy.diagnose import bad_layer


def test_a_layer_of_several_outputs_is_named_too() -> None:
    model = nn.Sequential(nn.LSTM(2, 2), nn.Identity())
    with torch.no_grad():
        model.get_parameter("0.weight_ih_l0").fill_(torch.nan)
    found = bad_layer(model, lambda m, b: m[0](b["x"]), {"x": torch.ones(3, 2)})  # type: ignore[index]
    assert found == "0"
