"""Layers whose gradient vanishes or explodes are reported once."""

from __future__ import annotations

import torch

from echelon.core.config import HealthSection
from echelon.loop.build import LayerHealth


def test_a_vanishing_and_an_exploding_layer_are_named_once() -> None:
    said: list[str] = []
    health = LayerHealth(
        HealthSection(every=10, vanishing=1e-6, exploding=100.0),
        lambda _step, message: said.append(message),
    )
    assert health.due(20)
    assert not health.due(21)
    weights = {name: torch.ones(4) for name in ("a", "b", "c")}
    grads = {"a": torch.ones(4), "b": torch.full((4,), 1e-9), "c": torch.full((4,), 1e4)}
    health.inspect(10, weights, grads)
    assert [line.split(":")[0] for line in said] == [
        "layer 'b' is vanishing",
        "layer 'c' is exploding",
    ]
    health.inspect(20, weights, grads)
    assert len(said) == 2, "told once"
    health.inspect(30, weights, dict.fromkeys(grads, torch.ones(4)))
    health.inspect(40, weights, grads)
    assert len(said) == 4, "told again after it had recovered"
