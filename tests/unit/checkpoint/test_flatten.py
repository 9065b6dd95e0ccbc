"""Nested state to named tensors and back."""

from __future__ import annotations

import pytest
import torch

from echelon.checkpoint.state import flatten, unflatten
from echelon.core.errors import CheckpointError


def test_nested_state_comes_back_as_it_was() -> None:
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3)},
        "steps": {0: {"n": 1}, 7: {"n": 2}},
        "betas": (0.9, 0.999),
        "list": [1, None, True, "word", float("inf")],
        "empty": {},
    }
    tensors, skeleton = flatten(state)
    back = unflatten(tensors, skeleton)
    assert torch.equal(back["model"].pop("w"), state["model"].pop("w"))  # type: ignore[attr-defined]
    assert back == state


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    weight = torch.ones(3)
    tensors, skeleton = flatten({"a": weight, "b": weight})
    assert list(tensors) == ["a"]
    back = unflatten(tensors, skeleton)
    assert back["a"] is back["b"]


def test_empty_tensors_are_not_taken_for_one_another() -> None:
    tensors, _ = flatten({"a": torch.empty(0), "b": torch.empty(0)})
    assert list(tensors) == ["a", "b"]


def test_what_is_not_plain_data_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"state at a/b is a object"):
        flatten({"a": {"b": object()}})
    with pytest.raises(CheckpointError, match="not plain names"):
        flatten({"a": {("x", 1): 2}})


def test_a_pointer_to_a_lost_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'gone' is missing"):
        unflatten({}, {"w": {"$tensor": "gone"}})
