"""The copy of a state in memory: equal, reused, refused if there is too little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.checkpoint import writer
from echelon.checkpoint.state import Flat, flatten
from echelon.checkpoint.writer import Snapshot, available_memory, first_non_finite, needed


def go_on() -> None:
    """Never gives up."""


def taken(kept: Snapshot, state: object) -> Flat:
    flat = flatten(state)
    assert kept.reserve(*needed(flat), go_on)
    return kept.take(flat)


def layouts() -> dict[str, Tensor]:
    return {
        "plain": torch.randn(4, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 2),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(5).bfloat16(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 7).T,
        "every other": torch.randn(10)[::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "double": torch.randn(3, dtype=torch.float64),
    }


def test_the_copy_is_equal_and_does_not_change_with_the_state() -> None:
    state = layouts()
    before = {name: tensor.clone() for name, tensor in state.items()}
    copy = taken(Snapshot(), state)
    for tensor in state.values():
        if tensor.numel() and tensor.stride() != (1, 0):
            tensor.zero_()
    for name, tensor in before.items():
        assert torch.equal(copy.tensors[name], tensor), name
        assert copy.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("threads", [1, 3])
def test_large_states_are_copied_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(writer, "_WORTH_THREADS", 1)
    monkeypatch.setattr(writer, "_PIECE", 1000)
    torch.set_num_threads(threads)
    state = {str(at): torch.randn(997, at + 1) for at in range(9)}
    copy = taken(Snapshot(), state)
    for name, tensor in state.items():
        assert torch.equal(copy.tensors[name], tensor)


def test_tied_weights_are_copied_once() -> None:
    weight = torch.randn(100)
    assert needed(flatten({"a": weight, "b": weight})) == needed(flatten({"a": weight}))


def test_the_memory_is_used_again_unless_it_is_too_small() -> None:
    kept = Snapshot()
    first = taken(kept, {"w": torch.ones(1000)}).tensors["w"]
    again = taken(kept, {"w": torch.zeros(10)}).tensors["w"]
    assert again.data_ptr() == first.data_ptr()
    larger = taken(kept, {"w": torch.randn(5000)}).tensors["w"]
    assert larger.untyped_storage().nbytes() >= 20_000


def test_too_little_memory_is_noticed_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 1 << 20
    monkeypatch.setattr(writer, "available_memory", lambda: writer._SPARE + 999)
    assert not Snapshot().reserve(1000, False, go_on)
    assert Snapshot().reserve(999, False, go_on)


def test_memory_that_is_refused_is_said_to_be_too_little() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "available_memory", lambda: 1 << 62)
        assert not Snapshot().reserve(1 << 60, False, go_on)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(kind: torch.dtype) -> None:
    good = torch.randn(3, 40_000).to(kind)
    bad = torch.zeros(3, 40_000, dtype=kind).T
    bad[39_999, 2] = torch.inf
    count = torch.tensor(7)
    assert first_non_finite([("a", good), ("n", count), ("b", bad), ("c", bad)]) == "b"
    assert first_non_finite([("a", good), ("n", count)]) is None
