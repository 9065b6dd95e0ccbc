"""One shard's part of a cut: its ranges of weights and of optimizer state, and what goes with it.

On the wire `head` is plain data and `body` raw tensors, in the order in which `blank` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echelon.comm.servers.partition import Partition
from echelon.core.errors import PeerError

Run = tuple[int, int, float]
"""Values [start, stop) of a range had so many updates."""
MOST_KEYS = 8


class BadPart(PeerError):
    """A peer's part of the state makes no sense."""


@dataclass(frozen=True, slots=True)
class Part:
    weights: list[Tensor]
    """Per range."""
    state: dict[str, list[Tensor]]
    """What the optimizer keeps for each value (`exp_avg`, say), per range."""
    steps: list[list[Run]]
    """Per range; runs follow each other without gaps. Empty if the optimizer does not count."""
    groups: dict[str, dict[str, Any]]
    """`penalised` and `plain`: the optimizer's options, for those of the two that are held."""

    def head(self) -> dict[str, Any]:
        return {
            "keys": list(self.state),
            "steps": [[list(run) for run in runs] for runs in self.steps],
            "groups": self.groups,
        }

    def body(self) -> list[Tensor]:
        return [*self.weights, *(tensor for tensors in self.state.values() for tensor in tensors)]


def blank(
    partition: Partition, shard: int, head: Any, memory: Callable[[str], list[Tensor]] | None = None
) -> Part:
    """A part to receive `body` into, if `head` is one of this partition's.

    `memory`: for "" (the weights) and each key, the shard's ranges; new ones if not given.
    """
    match head:
        case {"keys": list(keys), "steps": list(steps), "groups": dict(groups)} if (
            len(keys) <= MOST_KEYS
            and all(isinstance(key, str) and key for key in keys)
            and len(set(keys)) == len(keys)
            and groups.keys() <= {"penalised", "plain"}
            and all(isinstance(options, dict) for options in groups.values())
        ):
            runs = _runs(partition, shard, steps)
        case _:
            raise BadPart("a part of the state must have keys, steps and groups")
    take = memory or (lambda _: partition.empty(shard))
    return Part(take(""), {key: take(key) for key in keys}, runs, groups)


def group_word(penalised: bool) -> str:
    return "penalised" if penalised else "plain"


def _runs(partition: Partition, shard: int, steps: list[Any]) -> list[list[Run]]:
    ranges = partition.ranges(shard)
    if not steps:
        return []
    if len(steps) != len(ranges):
        raise BadPart(f"a part of the state counts steps of {len(steps)} ranges, not {len(ranges)}")
    return [_checked(runs, held.size) for runs, held in zip(steps, ranges, strict=True)]


def _checked(runs: Any, size: int) -> list[Run]:
    found: list[Run] = []
    end = 0
    for run in runs if isinstance(runs, list) else [None]:
        match run:
            case [int(start), int(stop), int() | float() as count] if start == end < stop <= size:
                found.append((start, stop, float(count)))
                end = stop
            case _:
                break
    if end != size or len(found) != len(runs):
        raise BadPart("a part of the state counts steps of other values than it has")
    return found
