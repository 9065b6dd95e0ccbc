"""One stage, what passes between stages, and the micro-batches that go through."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.core.errors import TaskError
from echelon.strategy.pipeline.line import Form, one_tensor
from echelon.strategy.pipeline.schedule import how_many, pieces
from echelon.strategy.pipeline.stage import Draws, Stage
from echelon.strategy.pipeline.state import options_of, without_elsewhere


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


def test_only_one_tensor_can_pass_between_stages() -> None:
    assert one_tensor(torch.ones(1), "3").numel() == 1
    with pytest.raises(TaskError, match="layer '3' gives a tuple where the pipeline is cut"):
        one_tensor((torch.ones(1),), "3")
    with pytest.raises(TaskError, match="Tensor of 1 dimensions and complex64 where"):
        one_tensor(torch.ones(1, dtype=torch.complex64), "3")
    with pytest.raises(TaskError, match=r"Tensor of 13 dimensions and .* in up to 12 dimensions"):
        one_tensor(torch.ones([1] * 13), "3")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(6, dtype=torch.uint8).view(2, 3),
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(0, 3),
        torch.tensor(1.5),
        torch.randn(1, 3).expand(4, 3),
    ],
)
def test_a_tensor_arrives_as_it_was_sent(tensor: Tensor) -> None:
    form = Form.of(tensor)
    assert Form.understood(form.described().tolist()) == form
    row = form.room()
    row.copy_(form.laid(tensor))
    arrived = form.read(row, torch.device("cpu"))
    assert torch.equal(arrived, tensor)
    dense = tensor.clone()  # keeps the order of dimensions, but not overlaps
    assert arrived.stride() == dense.stride() or tensor.stride()[0] == 0
    assert form.differentiable == tensor.is_floating_point()


@given(st.integers(1, 300), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_pieces_are_alike_and_make_up_the_batch(
    size: int, members: int, wanted: int | None
) -> None:
    count = how_many(size, members, wanted)
    found = [piece["x"] for piece in pieces({"x": torch.arange(size)}, count)]
    assert torch.cat(found).tolist() == list(range(size))  # type: ignore[arg-type]
    lengths = [len(piece) for piece in found]
    assert max(lengths) - min(lengths) <= 1
    assert len(found) == count <= (wanted or 4 * members)
    assert min(lengths) >= (2 if wanted is None and size > 1 else 1)


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


def test_what_others_keep_is_left_out_of_an_optimizers_state_and_the_unknown_is_not() -> None:
    saved = {"state": {"a": {}, "b": {}, "z": {}}, "groups": [{"lr": 2, "names": ["a", "b", "z"]}]}
    mine = without_elsewhere(saved, {"a"}, {"a", "b"})
    assert mine == {"state": {"a": {}, "z": {}}, "groups": [{"lr": 2, "names": ["a", "z"]}]}
    assert without_elsewhere({"groups": [{}]}, {"a"}, {"a"}) == {"groups": [{}]}
    assert options_of(saved, ["b"]) == {"lr": 2}
    assert options_of(saved, ["c"]) == {}
