"""A state that one member sends to others arrives unchanged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.loop import recovery

from . import members


class Recorded:
    """What one member sends is what another one receives."""

    def __init__(self) -> None:
        self.sent: list[list[Tensor]] = []
        self.receives = False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        assert source == 0
        if not self.receives:
            self.sent.append([tensor.clone() for tensor in tensors])
            return
        came = self.sent.pop(0)
        assert [(t.shape, t.dtype) for t in came] == [(t.shape, t.dtype) for t in tensors]
        for tensor, value in zip(tensors, came, strict=True):
            tensor.copy_(value)


def cut() -> dict[str, Any]:
    """Everything that a cut may hold."""
    torch.manual_seed(0)
    return {
        "strategy": {
            "version": 41,
            "model": {"weight": torch.randn(3, 5), "scale": torch.tensor(2.5)},
            "optimizer": {
                "step": torch.tensor(7, dtype=torch.int64),
                "moments": [torch.randn(4).bfloat16(), torch.empty(0, 3), torch.ones(2).half()],
                "betas": (0.9, 0.999),
            },
        },
        "random": {"torch": torch.get_rng_state(), "of": None},
        "loop": {"seconds": 1.5, "done": False, "left_out": [[0, 1, 2]], "name": "größe"},
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_a_cut_arrives_as_it_was_sent() -> None:
    peers, sent = Recorded(), cut()
    recovery.send(peers, sent)
    peers.receives = True
    found = recovery.receive(peers)
    assert same(found, sent)
    assert not peers.sent, "both send and receive as often"


def test_what_lies_crosswise_in_memory_arrives_in_order() -> None:
    peers = Recorded()
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    recovery.send(peers, {"weight": weight, "rows": torch.arange(6).view(2, 3).t()})
    peers.receives = True
    found = recovery.receive(peers)
    assert torch.equal(found["weight"], weight)
    assert found["rows"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.timeout(120)
def test_real_members_heal_each_other() -> None:
    """Two are behind; the one that is ahead is not the first of all."""

    def work(group: Any) -> dict[str, Any]:
        peers = group.collective([1, 0, 2])
        if group.index == 1:
            recovery.send(peers, cut())
        else:
            assert same(recovery.receive(peers), cut())
        return {"threads": threading.active_count()}

    members.run(3, work)
