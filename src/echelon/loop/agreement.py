"""Small values that all members of a generation agree on, and their random states.

The loop itself needs little from the other members: sums and short messages (`sum`, `led`, `told`),
a barrier, and the random state of every shard for a checkpoint (`draws`, `go_on`).
"""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from echelon.checkpoint import state as randomness
from echelon.checkpoint.state import flatten, unflatten
from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import PeerError, RunError
from echelon.core.interfaces import Comm
from echelon.core.types import Shard

_WORD = 8
"""Bytes in an int64."""


class Fellows:
    """The members of a generation. All of them call these methods together, in the same order.

    Random states belong to shards: members that read the same part of every batch draw the same
    numbers.
    """

    def __init__(self, comm: Comm, shard: Shard, seed: int) -> None:
        self._comm = comm
        self._shard = shard
        self._seed = seed
        self._made: Collective | None = None

    def sum(self, value: int) -> int:
        """Return the sum over all members. Blocks until every member has called it."""
        return int(self._collective().sum([float(value)])[0])

    def led(self, *mine: int) -> list[int]:
        """Broadcast integers from member 0. Blocks until every member has called it."""
        said = mine if self._comm.index == 0 else [0] * len(mine)
        return [int(value) for value in self._collective().sum([float(value) for value in said])]

    def told(self, mine: Any) -> list[Any]:
        """Gather plain data from all members, in their order."""
        text = json.dumps(mine).encode()
        found = self._gathered(torch.cat([torch.tensor([len(text)]), _words(text)]))
        return [json.loads(words[1:].numpy().tobytes()[: int(words[0])]) for words in found]

    def barrier(self) -> None:
        self._collective().barrier()

    def part(self) -> None:
        """Wait until all members of an elastic group are done.

        If the first member is lost before it has written the last checkpoint, the others must still
        be there to write it.
        """
        if self._comm.elastic and self._comm.count > 1:
            self._collective().barrier()

    def draws(self) -> dict[int, dict[str, Any]]:
        """Return the states of the random generators of every shard."""
        mine = randomness.capture()
        if self._shard.count == 1:
            return {0: mine}
        found: dict[int, dict[str, Any]] = {}
        for shard, state in map(_unpacked, self._gathered(_packed(self._shard.index, mine))):
            found.setdefault(shard, state)
        return found

    def go_on(self, draws: dict[int, dict[str, Any]], version: int) -> None:
        """Restore this shard's random state, or seed a new one if the shard did not exist."""
        mine = self._shard.index
        randomness.restore(draws.get(mine, draws[0]))
        if mine not in draws:
            randomness.part_ways(self._seed, mine, version)

    def check_version(self, version: int, where: object) -> None:
        """Raise if members loaded different checkpoints: their weights would never agree again."""
        if self._comm.count == 1:
            return
        found = [int(words[0]) for words in self._gathered(torch.tensor([version]))]
        if len(set(found)) > 1:
            told = ", ".join(f"member {member}: {step}" for member, step in enumerate(found))
            raise RunError(f"{where}: members found checkpoints of different steps ({told})")

    def _gathered(self, words: Tensor) -> list[Tensor]:
        """Gather one int64 tensor from every member, padded with zeros to the same length."""
        index, count = self._comm.index, self._comm.count
        collective = self._collective()
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[index] = len(words)
        collective.sum_(lengths)
        board = torch.zeros(count, 1 + int(lengths.max()), dtype=torch.int64)
        board[index, 0] = 1
        board[index, 1 : 1 + len(words)] = words
        collective.sum_(board)
        if not lengths.all() or not board[:, 0].all():
            raise PeerError("a member was lost while all told each other where they are")
        return list(board[:, 1:])

    def _collective(self) -> Collective:
        if self._made is None:
            self._made = cast(Group, self._comm).collective()  # only `Alone` has no collective
        return self._made


def _packed(shard: int, state: dict[str, Any]) -> Tensor:
    """Pack a shard's random state into int64 words: [shard, len(skeleton), len(tensors)], then the
    bytes of both."""
    tensors, skeleton = flatten(state)
    parts = [json.dumps(skeleton).encode(), save(tensors)]
    header = torch.tensor([shard, *map(len, parts)])
    return torch.cat([header, *map(_words, parts)])


def _unpacked(words: Tensor) -> tuple[int, dict[str, Any]]:
    shard, first, second = words[:3].tolist()
    body = words[3:].numpy().tobytes()
    start = first + -first % _WORD
    skeleton = json.loads(body[:first])
    state: dict[str, Any] = unflatten(load(body[start : start + second]), skeleton)
    return shard, state


def _words(data: bytes) -> Tensor:
    """Pad bytes with zeros and return them as int64 words."""
    filled = bytearray(data.ljust(len(data) + -len(data) % _WORD, b"\0"))
    return torch.frombuffer(filled, dtype=torch.int64)
