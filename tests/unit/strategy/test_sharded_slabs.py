"""Weights, gradients and optimizer state in slabs: divided, and put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.comm.collectives import Solo
from echelon.core.errors import CheckpointError, TaskError
from echelon.core.types import Parallel
from echelon.strategy.optimizer_shards import divide, in_row, lengths
from echelon.strategy.sharded import slabs as slabs_module
from echelon.strategy.sharded.slabs import Reduction, Slabs, give_back_large


def network() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Conv2d(2, 3, 3)
    first.weight.data = first.weight.data.to(memory_format=torch.channels_last)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(27, 5), nn.Linear(5, 1))


def divided(model: nn.Module, index: int, count: int) -> Slabs:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return Slabs(names, parameters, index, count)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_value_belongs_to_exactly_one_member(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs_module, "SLAB", 400)  # several slabs, some of one parameter
    for at, (_name, parameter) in enumerate(network().named_parameters()):
        owned = torch.zeros(parameter.numel())
        for index in range(count):
            piece = divided(network(), index, count).pieces[at]
            assert piece.local.numel() == piece.ranges[index][1] - piece.ranges[index][0]
            owned[slice(*piece.ranges[index])] += 1
        assert owned.eq(1).all()


def test_weights_stay_what_they_are_and_pieces_are_parts_of_them() -> None:
    model, before = network(), network().state_dict()
    held = divided(model, 1, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.stride() == before[name].stride() or value.numel() == len(value)
    for piece in held.pieces:
        with torch.no_grad():
            piece.local.fill_(7.0)
        start, stop = piece.ranges[1]
        parameter = model.get_parameter(piece.name)
        assert in_row(parameter)[start:stop].eq(7).all()
        assert int(parameter.eq(7).sum()) == stop - start


def test_a_whole_is_cut_like_the_parameter_however_it_lies() -> None:
    held = divided(network(), 0, 2)
    piece = next(piece for piece in held.pieces if piece.name == "0.weight")
    whole = torch.arange(piece.numel, dtype=torch.float32).view(piece.shape)
    last = whole.to(memory_format=torch.channels_last)
    parts = [piece.cut(each, 0, what="it") for each in (whole, last)]
    assert torch.equal(parts[0], parts[1])
    with pytest.raises(CheckpointError, match=r"it is \(2,\), but the parameter is \(3, 2, 3, 3\)"):
        piece.cut(torch.zeros(2), 0, what="it")


def test_gradients_of_several_passes_are_added_up_and_freed_at_once() -> None:
    model, reference = network(), network()
    held = divided(model, 0, 1)
    reduction = Reduction(Solo(), list(model.parameters()), held)
    x = torch.randn(4, 2, 5, 5)
    for part in x.split(2):
        model(part).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        reduction.flush()
    reduction.flush()  # a pass without samples adds nothing
    reference(x).square().sum().backward()
    for part, parameter in zip(reduction.parts, reference.parameters(), strict=True):
        torch.testing.assert_close(part, _in_row(parameter))
    assert all(reduction.seen)
    reduction.clear()
    assert not any(reduction.seen)
    model(x).square().sum().backward()
    reduction.flush()
    torch.testing.assert_close(reduction.parts[0], _in_row(next(reference.parameters())))


def _in_row(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, in the order of its values."""
    assert parameter.grad is not None
    return in_row(torch.empty_like(parameter).copy_(parameter.grad))


def test_an_optimizer_holds_parts_and_their_state_alone() -> None:
    model = network()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    held = divided(model, 1, 2)
    divide(optimizer, dict(zip(model.parameters(), held.pieces, strict=True)), 1)
    params = optimizer.param_groups[0]["params"]
    assert [p.numel() for p in params] == [piece.local.numel() for piece in held.pieces]
    for piece in held.pieces:
        kept = optimizer.state[piece.local]["sum"]
        assert kept.shape == piece.local.shape
        assert kept.untyped_storage().nbytes() == kept.nbytes  # the whole is gone
    with pytest.raises(TaskError, match="Adafactor cannot be divided among members"):
        divide(torch.optim.Adafactor(network().parameters()), {}, 0)


def test_members_along_the_axes() -> None:
    assert lengths(Parallel(), "sharded", 6) == (1, 6)
    assert lengths(Parallel(mesh={"data": 2}), "sharded", 6) == (2, 3)
    assert lengths(Parallel(mesh={"data": 3, "tensor": 2}), "tensor", 6) == (3, 2)


def test_large_buffers_go_back_to_the_system_when_they_are_freed() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    give_back_large()
    kept = []
    before = resident()
    for _ in range(8):
        large = torch.ones(2 << 20)
        kept.append(torch.ones(1 << 10))  # would pin a heap's end
        del large
    assert resident() - before < 4 << 20
    assert sum(float(small.sum()) for small in kept) == 8 * 1024
