"""Which shard an id belongs to: a matter of the id and the number of shards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.hashing import words

_KEY = 0x54A12D
_HALF = np.uint64(32)


class Sharing(NamedTuple):
    """Ids in the order of their shards, and how many are each one's."""

    order: Tensor | None
    """Places of `ids`, shard by shard; None if there is one shard."""
    sizes: list[int]

    @classmethod
    def of(cls, ids: Tensor, shards: int) -> Sharing:
        if shards == 1:
            return cls(None, [len(ids)])
        owner = shard_of(ids, shards)
        order = np.argsort(owner, kind="stable")
        return cls(torch.from_numpy(order), np.bincount(owner, minlength=shards).tolist())

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        if self.order is None:
            return [values]
        return torch.split(values.index_select(0, self.order), self.sizes)

    def joined(self, parts: Sequence[Tensor], width: int) -> Tensor:
        """Rows by shard, in the order of the ids."""
        if self.order is None:
            return parts[0]
        into = torch.empty(len(self.order), width)
        for places, rows in zip(self.order.split(self.sizes), parts, strict=True):
            into.index_copy_(0, places, rows)
        return into


def shard_of(ids: Tensor, shards: int) -> NDArray[np.int64]:
    """Evenly, whatever the ids are."""
    high = words(ids.numpy().view(np.uint64), _KEY) >> _HALF
    return (high * np.uint64(shards) >> _HALF).view(np.int64)


def part_of(state: Mapping[str, Tensor], shard: int, shards: int) -> dict[str, Tensor]:
    """A shard's rows; those that wait belong to shards of their own."""
    if shards == 1:
        return {name: value.contiguous() for name, value in state.items()}
    mine = torch.from_numpy(shard_of(state["ids"], shards) == shard)
    waiting = mine
    if "waiting_ids" in state:
        waiting = torch.from_numpy(shard_of(state["waiting_ids"], shards) == shard)
    return {
        name: value if name == "facts" else value[waiting if name.startswith("waiting") else mine]
        for name, value in state.items()
    }
