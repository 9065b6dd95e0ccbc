"""One stage: backward in one and in two parts, and random numbers per layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.strategy.pipeline.stage import Draws, Stage


def stage(*layers: nn.Module) -> Stage:
    draws = Draws(torch.device("cpu"))
    return Stage(1, 0, layers, contextlib.nullcontext, draws.begin)


def gradients(layers: Sequence[nn.Module], x: Tensor, *, cut: bool) -> list[Tensor | None]:
    """Of the input and the weights, over two micro-batches."""
    made, found = stage(*layers), list[Tensor | None]()
    for micro, part in enumerate(x.split(2)):
        y = made.forward(micro, part.clone(), passed=True, learning=True)
        y = made.keep(micro, y, cut=cut)
        start = torch.linspace(-1, 1, y.numel()).view(y.shape)
        back = made.backward_input if cut else made.backward
        found.append(back(micro, start))
    for micro in range(2):
        if cut:
            made.backward_weights(micro)
    return [*found, *(p.grad for layer in layers for p in layer.parameters())]


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def recomputed(layer: nn.Module) -> nn.Module:
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return layer


def chains() -> dict[str, list[nn.Module]]:
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    return {
        "plain": [nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)],
        "normed": [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)],
        "shared": [shared, nn.Tanh(), shared],
        "a view at the end": [nn.Linear(4, 3), Turned()],
        "a block": [block],
        "frozen": [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)],
        "recomputed": [recomputed(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))],
        "all frozen": [nn.Linear(4, 4).requires_grad_(False)],
    }


@pytest.mark.parametrize("name", chains())
def test_backward_in_two_parts_is_backward(name: str) -> None:
    x = torch.randn(4, 4)
    whole, parts = (gradients(chains()[name], x, cut=cut) for cut in (False, True))
    for one, other in zip(whole, parts, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def test_group_norm_with_channels_last_does_not_crash_backward_in_two_parts() -> None:
    images = torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last)
    whole, parts = (gradients([nn.GroupNorm(1, 4)], images, cut=cut) for cut in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))  # type: ignore[arg-type]


def test_a_stage_is_not_asked_for_the_gradient_of_whole_numbers() -> None:
    for cut in (False, True):
        made = stage(nn.Embedding(5, 2))
        y = made.forward(0, torch.tensor([1, 2]), passed=True, learning=True)
        made.keep(0, y, cut=cut)
        if cut:
            assert made.backward_input(0, torch.ones(2, 2)) is None
            made.backward_weights(0)
        else:
            assert made.backward(0, torch.ones(2, 2)) is None
        assert all(p.grad is not None for p in made.trained)


def test_layers_draw_their_own_numbers_and_use_up_nobodys() -> None:
    draws = Draws(torch.device("cpu"))

    def drawn(version: int, layer: int, micro: int) -> float:
        with draws.during(version, 0):
            draws.begin(layer, micro)
            return float(torch.rand(()))

    before = torch.get_rng_state()
    found = {drawn(v, layer, m) for v in range(3) for layer in range(3) for m in range(3)}
    assert len(found) == 27
    assert drawn(1, 2, 0) in found
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert drawn(1, 2, 0) not in found
