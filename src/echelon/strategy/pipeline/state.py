"""The state of the complete model, put together at the first place of a pipeline.

    place 1, 2, …: length of the text ─▶ JSON with names and shapes ─▶ the tensors ─▶ place 0

An optimizer's saved state is taken apart again with `without_elsewhere` and `options_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.strategy.pipeline.line import Line

Part = dict[str, dict[str, Any]]
"""Name → its tensors and plain values."""


def gather(line: Line, place: int, places: int, part: Part) -> Part:
    """Return all parts in one at place 0, and the member's own part at other places."""
    if place > 0:
        _send(line, part)
        return part
    whole: Part = {}
    for other in range(places - 1, 0, -1):
        whole.update(_receive(line, other))
    return whole | part


def _send(line: Line, part: Part) -> None:
    tensors: list[Tensor] = []
    said = {
        name: {key: _described(value, tensors) for key, value in held.items()}
        for name, held in part.items()
    }
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    line.send(torch.tensor([len(text)]), 0, 0)
    line.send(text, 0, 0)
    for tensor in tensors:
        line.send(tensor.detach().cpu().contiguous(), 0, 0)
    line.settle()


def _described(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensors.append(value)
    return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}


def _receive(line: Line, place: int) -> Part:
    size = line.receive(torch.zeros(1, dtype=torch.int64), place, 0)
    text = line.receive(torch.empty(int(size), dtype=torch.uint8), place, 0)
    said = json.loads(bytes(text.numpy()))
    return {
        name: {key: _understood(line, place, value) for key, value in held.items()}
        for name, held in said.items()
    }


def _understood(line: Line, place: int, value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {_TENSOR}:
        return value
    dtype, shape = value[_TENSOR]
    room = torch.empty(shape, dtype=getattr(torch, dtype))
    return line.receive(room, place, 0)


_TENSOR = "tensor"


def without_elsewhere(
    saved: Mapping[str, Any], mine: set[str], everywhere: set[str]
) -> dict[str, Any]:
    """Return an optimizer's saved state without parameters of other members.

    Unknown names stay in, so that loading the state refuses them.
    """
    if not _is_whole(saved):
        return dict(saved)  # loading it raises the error
    elsewhere = everywhere - mine
    groups = [
        {**group, "names": [name for name in group["names"] if name not in elsewhere]}
        for group in saved["groups"]
    ]
    state = {name: held for name, held in saved["state"].items() if name not in elsewhere}
    return {"state": state, "groups": groups}


def _is_whole(saved: Mapping[str, Any]) -> bool:
    return "state" in saved and all("names" in group for group in saved.get("groups", ()))


def options_of(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the options with which these parameters were saved."""
    for group in saved["groups"]:
        if not set(names).isdisjoint(group["names"]):
            return {key: value for key, value in group.items() if key != "names"}
    return {}
