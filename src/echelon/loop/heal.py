"""One member's cut, sent to members that are behind: from memory to memory, nothing on disk.

source:  cut ─▶ outline (names, shapes, plain values) ─▶ tensors, one behind the other
behind:  outline ─▶ room for the tensors ─▶ the same cut
"""

from __future__ import annotations

import json
from typing import Any

import torch

from echelon.checkpoint.state import flatten, unflatten
from echelon.core.interfaces import Sending


def send(peers: Sending, cut: dict[str, Any]) -> None:
    """To all other members of `peers`, of which this one is the first."""
    tensors, skeleton = flatten(cut)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in held.items()}
    outline = json.dumps({"skeleton": skeleton, "tensors": shapes}).encode()
    peers.broadcast_([torch.tensor([len(outline)])])
    peers.broadcast_([torch.frombuffer(bytearray(outline), dtype=torch.uint8)])
    peers.broadcast_([tensor for tensor in held.values() if tensor.numel()])


def receive(peers: Sending) -> dict[str, Any]:
    """What the first member of `peers` sends."""
    length = torch.tensor([0])
    peers.broadcast_([length])
    text = torch.empty(int(length), dtype=torch.uint8)
    peers.broadcast_([text])
    outline = json.loads(text.numpy().tobytes())
    held = {
        name: torch.empty(shape, dtype=getattr(torch, kind))
        for name, (kind, *shape) in outline["tensors"].items()
    }
    peers.broadcast_([tensor for tensor in held.values() if tensor.numel()])
    cut = unflatten(held, outline["skeleton"])
    assert isinstance(cut, dict)
    return cut
