"""A shard's weights and optimizer state, flat, and how updates are applied to them in place.

    staged push 0 ─┐
    staged push 1 ─┴─▶ Σ, in cache ─▶ one fused kernel: weights, state        chunk by chunk

Whoever drives `apply` may send a chunk on its way while the next one is worked on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.comm.servers.part import Part, Run, group_word
from echelon.comm.servers.partition import Partition, Range
from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError
from echelon.optim import spare_compiler
from echelon.optim.gradients import clip_value_, global_norm
from echelon.server.pieces import Piece, Rule

CHUNK = 1 << 22
"""Bytes of weights that are updated by one kernel call: it costs 5 µs of Python."""
Grads = Sequence[Tensor]
"""One push's gradients, per range."""


class Done(NamedTuple):
    """Weights [start, stop) of a range are the new ones."""

    range: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stale:
    """What a push was computed on, to make up for what has happened since."""

    base: Sequence[Tensor]
    strength: float

    def compensate_(self, grad: Tensor, weights: Tensor, base: Tensor) -> None:
        """g + λ·g²·(w_now − w_then): Zheng et al. 2017, the Hessian's diagonal taken for g²."""
        moved = weights.sub(base).mul_(grad).mul_(grad)
        grad.add_(moved, alpha=self.strength)


class Flats:
    """One shard's ranges. `weights` may be given: views of memory that others see, too."""

    def __init__(
        self,
        partition: Partition,
        shard: int,
        section: OptimizerSection,
        weights: Sequence[Tensor] | None = None,
        chunk: int = CHUNK,
    ) -> None:
        spare_compiler()
        self._partition = partition
        self._ranges = partition.ranges(shard)
        self._dtypes = partition.dtypes(shard)
        self._chunk = chunk
        flats = partition.layout.flats
        kinds = [flats[held.flat].penalised for held in self._ranges]
        self._words = [group_word(kind) for kind in kinds]
        self._rules = {group_word(kind): Rule(section, kind) for kind in (True, False)}
        self.weights = list(weights) if weights is not None else self._zeros()
        assert [w.numel() for w in self.weights] == [r.size for r in self._ranges]
        self._state = self._blank_state()
        self._lay([[(0, held.size, 0.0)] for held in self._ranges])
        self._scratch: dict[torch.dtype, Tensor] = {}

    def reduce(self, pushes: Sequence[Grads]) -> float:
        """Add all pushes to the first one, in place; returns the square of the sum's norm.

        For clipping by global norm, which has to know all of it before anything is applied.
        """
        first, *others = pushes
        for push in others:
            torch._foreach_add_(list(first), list(push))
        return float(global_norm(list(first))) ** 2

    def apply(
        self,
        pushes: Sequence[Grads],
        *,
        scale: float,
        factor: float,
        clip: float = 1.0,
        limit: float | None = None,
        missing: Collection[int] = (),
        stale: Sequence[Stale | None] = (),
    ) -> Iterator[Done]:
        """Update all weights with Σ pushes · `scale` · `clip`, at `factor` times the learning rate.

        It has to be driven to its end. Staged gradients may be changed by it. `limit`: single
        values are clipped to it; `missing`: parameters nobody has a gradient of, which stay what
        they are; `stale`: per push, what it is to be compensated for.
        """
        skipped = self._skipped(missing) if missing else set()
        plain = len(pushes) == 1 and limit is None and not any(stale)
        for at, pieces in enumerate(self._pieces):
            for piece in pieces:
                if (at, piece.start) in skipped:
                    continue
                start, stop = piece.start, piece.stop
                if plain:
                    piece.step(pushes[0][at][start:stop], factor, scale, clip)
                elif limit is None and not any(stale):
                    piece.step(self._sum(pushes, at, piece), factor, scale, clip)
                else:
                    grad = self._gathered(pushes, at, piece, scale, stale)
                    if limit is not None:
                        clip_value_([grad], limit)
                    piece.step(grad, factor, 1.0, clip)
                yield Done(at, start, stop)

    def apply_whole(self, pushes: Sequence[Grads], *, scale: float, factor: float) -> None:
        """`apply`, in one go."""
        for _ in self.apply(pushes, scale=scale, factor=factor):
            pass

    def part(self) -> Part:
        """Everything that makes up this shard; tensors are not copied."""
        counted = any("step" in rule.keys for rule in self._rules.values())
        steps = [_merged(piece.run for piece in pieces) for pieces in self._pieces]
        groups = {
            word: pieces[0].options
            for word, pieces in zip(self._words, self._pieces, strict=True)
            if pieces
        }
        return Part(self.weights, self._state, steps if counted else [], groups)

    def load(self, part: Part) -> None:
        """Become what `part` says, or refuse all of it.

        Without options the job's own are kept; without state it is as before the first update.
        """
        chosen = {word: self._rules[word].checked(part.groups[word]) for word in part.groups}
        if lacking := set(self._words) - chosen.keys() if chosen else None:
            raise CheckpointError(f"optimizer state lacks the options of {sorted(lacking)}")
        before = {word: rule.options for word, rule in self._rules.items()}
        self._choose(chosen)
        wanted = self._keys() - {"step"}
        if part.state and part.state.keys() != wanted:
            self._choose(before)
            have, want = (", ".join(sorted(keys)) or "nothing" for keys in (part.state, wanted))
            raise CheckpointError(f"optimizer state holds {have}; it should hold {want}")
        self._copy(part)
        self._lay(part.steps or [[(0, held.size, 0.0)] for held in self._ranges])

    def _choose(self, options: Mapping[str, dict[str, Any]]) -> None:
        for word, chosen in options.items():
            self._rules[word].options = chosen

    def _copy(self, part: Part) -> None:
        self._state = self._blank_state()
        for mine, theirs in zip(self.weights, part.weights, strict=True):
            mine.copy_(theirs)
        for key, held in part.state.items():
            for mine, theirs in zip(self._state[key], held, strict=True):
                mine.copy_(theirs)

    def _keys(self) -> set[str]:
        return set().union(*(self._rules[word].keys for word in self._words))

    def _zeros(self) -> list[Tensor]:
        # `zero_` rather than `zeros`: memory is touched now, not in the first update.
        return [
            torch.empty(held.size, dtype=dtype).zero_()
            for held, dtype in zip(self._ranges, self._dtypes, strict=True)
        ]

    def _blank_state(self) -> dict[str, list[Tensor]]:
        return {key: self._zeros() for key in sorted(self._keys() - {"step"})}

    def _lay(self, steps: Sequence[Sequence[Run]]) -> None:
        """Cut all ranges into pieces of at most a chunk whose values had as many updates each."""
        self._pieces = [
            [self._piece(at, run) for run in self._chunks(at, runs)]
            for at, runs in enumerate(steps)
        ]

    def _chunks(self, at: int, runs: Iterable[Run]) -> Iterator[Run]:
        size = max(1, self._chunk // self._dtypes[at].itemsize)
        for first, last, count in runs:
            for start in range(first, last, size):
                yield start, min(start + size, last), count

    def _piece(self, at: int, run: Run) -> Piece:
        state = {key: held[at] for key, held in self._state.items()}
        return Piece(self._rules[self._words[at]], run, self.weights[at], state)

    def _sum(self, pushes: Sequence[Grads], at: int, piece: Piece) -> Tensor:
        """Of all pushes for one piece, in memory that stays in the cache."""
        found = self._scratch_for(piece)
        span = slice(piece.start, piece.stop)
        torch.add(pushes[0][at][span], pushes[1][at][span], out=found)
        for push in pushes[2:]:
            found.add_(push[at][span])
        return found

    def _gathered(
        self,
        pushes: Sequence[Grads],
        at: int,
        piece: Piece,
        scale: float,
        stale: Sequence[Stale | None],
    ) -> Tensor:
        """Σ pushes · scale for one piece, each made up for its staleness."""
        found = self._scratch_for(piece).zero_()
        span = slice(piece.start, piece.stop)
        for push, past in zip_longest(pushes, stale):
            grad = push[at][span].mul_(scale)
            if past is not None:
                past.compensate_(grad, piece.weights, past.base[at][span])
            found.add_(grad)
        return found

    def _scratch_for(self, piece: Piece) -> Tensor:
        dtype, size = piece.weights.dtype, piece.stop - piece.start
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < size:
            scratch = self._scratch[dtype] = torch.empty(size, dtype=dtype)
        return scratch[:size]

    def _skipped(self, missing: Collection[int]) -> set[tuple[int, int]]:
        """(range, start) of the pieces that hold these parameters and nothing else."""
        slots = [self._partition.layout.slots[at] for at in missing]
        found: set[tuple[int, int]] = set()
        for at, held in enumerate(self._ranges):
            spans = [
                span for slot in slots if (span := _within(held, slot.flat, slot.start, slot.stop))
            ]
            for start, stop in spans:
                self._cut(at, start)
                self._cut(at, stop)
            found |= {
                (at, piece.start)
                for piece in self._pieces[at]
                if any(start <= piece.start < stop for start, stop in spans)
            }
        return found

    def _cut(self, at: int, place: int) -> None:
        """See to it that no piece reaches over `place`."""
        pieces = self._pieces[at]
        for index, piece in enumerate(pieces):
            start, stop, count = piece.run
            if start < place < stop:
                halves = [(start, place, count), (place, stop, count)]
                pieces[index : index + 1] = [self._piece(at, half) for half in halves]
                return


def _within(held: Range, flat: int, start: int, stop: int) -> tuple[int, int] | None:
    """Values [start, stop) of a flat as far as the range has them, counted from its beginning."""
    low, high = max(start, held.start), min(stop, held.stop)
    return (low - held.start, high - held.start) if flat == held.flat and low < high else None


def _merged(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for start, stop, count in runs:
        if found and found[-1][2] == count:
            found[-1] = (found[-1][0], stop, count)
        else:
            found.append((start, stop, count))
    return found
