"""The contents of one shard: flat weights with their optimizer state, and rows of tables.

`Flats` has the dense weights: a few flat ranges, updated in place, chunk by chunk.

    staged push 0 ─┐
    staged push 1 ─┴─▶ Σ, in cache ─▶ one fused kernel: weights, state        chunk by chunk

`Flats.apply` is a generator: its caller can send a finished chunk while the next one is computed.

`Tables` has the rows. Their staged gradients belong to a push like the dense ones: the entry that
names the push applies both, or neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from echelon.comm.ps.layout import Partition, Range
from echelon.comm.ps.messages import MOST_TABLES, PIECE, RowHead, outline
from echelon.comm.ps.state import Part, Run, group_word
from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError, PeerError
from echelon.core.types import RowSpec
from echelon.optim import spare_compiler
from echelon.optim.build import build_for
from echelon.optim.fused import state_keys
from echelon.optim.gradients import clip_value_, global_norm
from echelon.optim.state import options_of, same_options, set_options
from echelon.optim.step import Stepper
from echelon.optim.tables import RowGradients, Rows, merged
from echelon.server.decisions import Entry, Staged

# Dense weights

CHUNK = 1 << 22
"""Bytes of weights that one kernel call updates. A call costs 5 µs of Python."""
Grads = Sequence[Tensor]
"""One push's gradients, per range."""


class Done(NamedTuple):
    """A finished chunk: weights [start, stop) of a range have their new values."""

    range: int
    start: int
    stop: int


class Flats:
    """The flat weights and optimizer state of one shard.

    `weights` may be given, as views of shared memory. `chunk`: bytes that one kernel call updates.
    A range is cut into pieces of at most a chunk; each piece has a fused optimizer of its own.
    """

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

        The caller has to iterate to the end. The pushes may be changed. `limit`: single values are
        clipped to it; `missing`: parameters without a gradient, which keep their values; `stale`:
        per push, what to compensate it for, or None.
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

    def reduce(self, pushes: Sequence[Grads]) -> float:
        """Add all pushes to the first one, in place, and return the squared norm of the sum.

        Clipping by global norm needs it before anything is applied.
        """
        first, *others = pushes
        for push in others:
            torch._foreach_add_(list(first), list(push))
        return float(global_norm(list(first))) ** 2

    def part(self) -> Part:
        """Return weights, optimizer state and options of this shard. Tensors are not copied."""
        counted = any("step" in rule.keys for rule in self._rules.values())
        steps = [_merged(piece.run for piece in pieces) for pieces in self._pieces]
        groups = {
            word: pieces[0].options
            for word, pieces in zip(self._words, self._pieces, strict=True)
            if pieces
        }
        return Part(self.weights, self._state, steps if counted else [], groups)

    def load(self, part: Part) -> None:
        """Load a part, or raise CheckpointError and change nothing.

        Without options in it the job's own are kept; without state, the state is a new one.
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
        """Return what the optimizer keeps for each weight, and `step` if it counts updates."""
        return set().union(*(self._rules[word].keys for word in self._words))

    def _blank_state(self) -> dict[str, list[Tensor]]:
        return {key: self._zeros() for key in sorted(self._keys() - {"step"})}

    def _zeros(self) -> list[Tensor]:
        # `zero_` rather than `zeros` touches the memory now, not in the first update.
        return [
            torch.empty(held.size, dtype=dtype).zero_()
            for held, dtype in zip(self._ranges, self._dtypes, strict=True)
        ]

    def _lay(self, steps: Sequence[Sequence[Run]]) -> None:
        """Cut all ranges into pieces of at most a chunk.

        `steps`: per range, runs of weights that had the same number of updates. They differ once a
        parameter had no gradient; no piece reaches over two runs.
        """
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
        """Return Σ pushes for one piece, in scratch memory that stays in the cache."""
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
        """Return Σ pushes · scale for one piece, each push compensated for its staleness."""
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
        """Cut pieces so that these parameters have their own; return those as (range, start)."""
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
        """Cut the piece that reaches over `place` in two."""
        pieces = self._pieces[at]
        for index, piece in enumerate(pieces):
            start, stop, count = piece.run
            if start < place < stop:
                halves = [(start, place, count), (place, stop, count)]
                pieces[index : index + 1] = [self._piece(at, half) for half in halves]
                return


@dataclass(frozen=True, slots=True)
class Stale:
    """Delay compensation of one push (DC-ASGD): the weights it was computed with, and λ."""

    base: Sequence[Tensor]
    strength: float

    def compensate_(self, grad: Tensor, weights: Tensor, base: Tensor) -> None:
        """g ← g + λ·g²·(w_now − w_then): Zheng et al. 2017, with g² for the Hessian's diagonal."""
        moved = weights.sub(base).mul_(grad).mul_(grad)
        grad.add_(moved, alpha=self.strength)


class Piece:
    """Weights [start, stop) of a range, which one kernel call updates."""

    __slots__ = ("_group", "_lane", "_stepper", "start", "stop", "weights")

    def __init__(self, rule: Rule, run: Run, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        self.start, self.stop, count = run
        mine = {key: values[self.start : self.stop] for key, values in state.items()}
        if "step" in rule.keys:
            mine["step"] = torch.tensor(count, dtype=torch.float32)
        self._stepper = rule.stepper(weights[self.start : self.stop], mine)
        self._group = self._stepper.optimizer.param_groups[0]
        self.weights: Tensor = self._group["params"][0]
        lanes = self._stepper.lanes
        self._lane = lanes[0] if lanes and not lanes[0].penalised else None

    @property
    def run(self) -> Run:
        """Return start, stop and the number of updates; 0 if the optimizer does not count them."""
        held = self._stepper.optimizer.state.get(self.weights, {})
        return self.start, self.stop, float(held.get("step", 0.0))

    @property
    def options(self) -> dict[str, Any]:
        return options_of(self._group)

    def step(self, grad: Tensor, factor: float, scale: float, clip: float = 1.0) -> None:
        """Make one update with `grad` · `scale` · `clip`. `grad` may be changed."""
        # No other code has this optimizer, so the checks of `Stepper.step` (hooks, changed groups)
        # are not needed.
        if self._lane is not None:
            self._group["lr"] = self._group["initial_lr"] * factor
            self._lane.update([grad], scale * clip)
            return
        if clip != 1.0:  # round as a single process does, which clips after it has divided
            grad.mul_(scale)
            scale = clip
        self.weights.grad = grad
        self._stepper.step(factor, scale)
        self.weights.grad = None


class Rule:
    """The optimizer's settings for weights of one kind, penalised or not."""

    def __init__(self, section: OptimizerSection, penalised: bool) -> None:
        self._section = section
        self._penalised = penalised
        self._sample = build_for(section, [nn.Parameter(torch.zeros(1))], penalised)
        group = self._sample.param_groups[0]
        self.options = options_of(group) | {"initial_lr": float(group["lr"])}

    @property
    def keys(self) -> set[str]:
        """Return what is kept for each weight, including `step` if updates are counted."""
        found = state_keys(self._sample, self._sample.param_groups[0] | self.options)
        assert found is not None, f"{self._section.name} keeps what nobody knows"
        return found

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved options. Raises CheckpointError if they are of another optimizer."""
        return same_options(self.options, dict(options))

    def stepper(self, weights: Tensor, state: Mapping[str, Tensor]) -> Stepper:
        """Return a stepper that updates `weights` and `state` in place."""
        parameter = nn.Parameter(weights, requires_grad=False)
        optimizer = build_for(self._section, [parameter], self._penalised)
        group = optimizer.param_groups[0]
        group["initial_lr"] = group["lr"]
        set_options(group, self.options)
        if state:
            optimizer.state[parameter] = dict(state)
        return Stepper(optimizer, [("", parameter)])


def _within(held: Range, flat: int, start: int, stop: int) -> tuple[int, int] | None:
    """Return the part of a flat's values [start, stop) that the range has, counted from the
    range's start; None if it has none of them."""
    low, high = max(start, held.start), min(stop, held.stop)
    return (low - held.start, high - held.start) if flat == held.flat and low < high else None


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Join runs of equal counts."""
    found: list[Run] = []
    for start, stop, count in runs:
        if found and found[-1][2] == count:
            found[-1] = (found[-1][0], stop, count)
        else:
            found.append((start, stop, count))
    return found


# Rows of tables

_Parts = dict[int, list[RowGradients]]
Sums = dict[int, RowGradients]
"""Summed gradients, by the number of their table."""


class Tables:
    """One shard's part of all tables: its rows, and the gradients that trainers have staged.

    Updates come in the gate's order, one at a time. Pulls come from any thread.
    """

    def __init__(self, specs: Any) -> None:
        if not isinstance(specs, list) or len(specs) > MOST_TABLES:
            raise PeerError(f"a set-up may have a list of up to {MOST_TABLES} tables")
        try:
            self._specs = [RowSpec.model_validate(spec) for spec in specs]
        except ValidationError as error:
            raise PeerError(f"a table makes no sense: {error.errors()[0]['msg']}") from None
        self._staged: dict[int, tuple[int, _Parts]] = {}
        self._summed: Sums = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._specs)

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = [Rows(spec) for spec in self._specs]
        self._staged.clear()

    def pull(self, table: int, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return self.at(table).pull(ids, out)

    def has(self, held: Rows) -> bool:
        """Return whether these are the rows of a table still; `clear` replaces them."""
        return any(held is rows for rows in self._rows)

    def at(self, table: int) -> Rows:
        if not 0 <= table < len(self._rows):
            raise PeerError(f"asks for table {table} of {len(self._rows)}")
        return self._rows[table]

    def blank(self, head: RowHead, size: int) -> list[Tensor]:
        """Return room for a message of gradients of `size` bytes: ids, sums and perhaps counts."""
        width = self.at(head.table).spec.width
        each = 8 + 4 * width + (4 if head.counted else 0)
        if not head.size or size != head.size * each:
            raise PeerError(f"gradients of {head.size} rows in {size:,} bytes")
        body = [torch.empty(head.size, dtype=torch.int64), torch.empty(head.size, width)]
        return [*body, torch.empty(head.size, dtype=torch.int32)] if head.counted else body

    def stage(self, member: int, seq: int, head: RowHead, body: Sequence[Tensor]) -> None:
        """Stage a received message of gradients for push `seq`.

        `head.more` adds to the messages before it. Otherwise it replaces them, so a push that is
        sent again is staged once.
        """
        ids, sums = body[:2]
        order = ids.numpy()
        if not (order[1:] > order[:-1]).all():
            raise PeerError("gradients of rows whose ids are not in order")
        counts = body[2].long() if len(body) == 3 else torch.ones_like(ids)
        held = self._staged.get(member)
        if held is None or held[0] != seq:
            held = self._staged[member] = seq, {}
        before = held[1].get(head.table, []) if head.more else []
        held[1][head.table] = [*before, RowGradients(ids, sums, counts)]

    def forget(self, member: int, seq: int | None = None) -> None:
        """Drop what a member has staged, up to push `seq` if it is given."""
        held = self._staged.get(member)
        if held is not None and (seq is None or held[0] <= seq):
            del self._staged[member]

    def reduce(self, pushes: Sequence[Staged]) -> float:
        """Add up the staged gradients of these pushes, and return the squared norm of the sums.

        `summed` returns the sums afterwards.
        """
        self._sum_up(pushes)
        return sum(float(found.sums.double().square().sum()) for found in self._summed.values())

    def summed(self, entry: Entry) -> Sums:
        """Return the summed gradients of an entry. `reduce` has made them if it is measured."""
        if not entry.measured:
            self._sum_up(entry.pushes)
        return self._summed

    def _sum_up(self, pushes: Sequence[Staged]) -> None:
        parts: _Parts = {}
        for push in pushes:
            seq, held = self._staged.get(push.member, (push.seq, {}))
            if seq == push.seq:
                for table, found in held.items():
                    parts.setdefault(table, []).extend(found)
        self._summed = {table: merged(found) for table, found in parts.items()}

    def repeat(self, entry: Entry, sums: Sums, scale: float) -> None:
        """Apply an entry's summed gradients, and drop what was staged for it.

        The shard and its twin both call it. All tables come to the entry's version, even those
        without a row in it.
        """
        for at, rows in enumerate(self._rows):
            ids, summed, counts = sums.get(at) or _nothing(rows.spec.width)
            if entry.limit is not None:
                summed.mul_(scale).clamp_(-entry.limit, entry.limit)
            once = scale if entry.limit is None else 1.0
            rows.push(ids, summed, counts, factor=entry.factor, version=entry.version, scale=once)
        self._summed = {}
        for push in entry.pushes:
            self.forget(push.member, push.seq)

    def pieces(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yield heads and bodies of messages that bring all rows of all tables to a twin."""
        for at, rows in enumerate(self._rows):
            each = sum(value[:1].nbytes for value in rows.blank().values())
            start: int | None = 0
            while start is not None:
                more = start > 0
                part, start = rows.part(start, max(1, PIECE // each))
                yield {"table": at, "more": more, "outline": outline(part)}, list(part.values())

    def load(self, table: int, state: Mapping[str, Tensor], *, more: bool = False) -> None:
        self.at(table).load(state, more=more)

    def blank_sums(self, sizes: Any) -> Sums:
        """Return room for another process's sums, whose sizes `lengths` has listed."""
        found: Sums = {}
        for at, size in sizes:
            ids = torch.empty(size, dtype=torch.int64)
            sums = torch.empty(size, self.at(at).spec.width)
            found[at] = RowGradients(ids, sums, torch.empty_like(ids))
        return found

    def figures(self) -> dict[str, float]:
        found = {f"rows_{rows.spec.name}": float(len(rows)) for rows in self._rows}
        waiting = {
            f"waiting_{rows.spec.name}": float(rows.waiting)
            for rows in self._rows
            if rows.spec.admit > 1
        }
        return found | waiting


def _nothing(width: int) -> RowGradients:
    none = torch.empty(0, dtype=torch.int64)
    return RowGradients(none, torch.empty(0, width), none)


def lengths(sums: Sums) -> list[list[int]]:
    """Return (table, number of rows) of all sums, for `Tables.blank_sums`."""
    return [[at, len(found.ids)] for at, found in sums.items()]


def flat(sums: Sums) -> list[Tensor]:
    """Return all tensors of the sums in one list, to send or receive them."""
    return [tensor for found in sums.values() for tensor in found]
