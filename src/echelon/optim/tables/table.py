"""Rows in memory.

A table's rows in this process's memory: read by anybody, made and changed by updates alone.

pull:  ids ─▶ slots ─▶ rows; what is not there reads as its first values (zeros if it has yet
       to be admitted), and is not made
push:  ids ─▶ slots ─▶ those that are new: counted, admitted, given a slot and first values
                    ─▶ the rule, over all rows at once
then a few of the others are looked at, and forgotten if they have expired
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.core.errors import CheckpointError
from echelon.core.types import RowSpec
from echelon.optim.tables.index import FIRST, NONE, Column, Ids, Index, Waiting, next_part, reserve
from echelon.optim.tables.rules import Initial, apply_, state_columns

# --- rows ---

_SWEEP = 1 << 13
_PIECE = 1 << 20
_RECENT = 8


class _Pulled(NamedTuple):
    """What was looked up a moment ago, and with how many removals before it."""

    ids: Tensor
    slots: Ids
    removals: int


class Rows:
    """The rows of one table, or of one server's part of it. Threads may share it."""

    remote = False

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.version = 0
        """The last update that was applied."""
        self._lock = threading.Lock()
        self._changes = Changes()
        self._start_over()

    def __len__(self) -> int:
        return self._index.count

    @property
    def waiting(self) -> int:
        """Ids that are counted but not admitted."""
        return 0 if self._waiting is None else len(self._waiting)

    @torch.no_grad()
    def pull(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """The row of each id, [n, width]. Nothing is changed by looking.

        A push of the same ids is spared the search; the tensor must not change until then.
        """
        with self._lock:
            slots = self._index.find(ids.numpy())
            self._recent.appendleft(_Pulled(ids, slots, self._index.removals))
            rows, slots = self._read(slots, out)
        return self._with_first_values(ids, rows, slots)

    def own(self, ids: Tensor) -> Tensor:
        """Ids of memory that others may write to, as they are now: a copy, or those of a pull."""
        for pulled in tuple(self._recent):  # other threads pull meanwhile
            if _same(pulled.ids, ids):
                return pulled.ids
        return ids.clone()

    def expect(self, ids: Tensor) -> None:
        """They are here already."""

    @property
    def turn(self) -> int:
        """What is pulled from now on has all changes up to this one."""
        return self._changes.turn

    @torch.no_grad()
    def changes(self, ids: Tensor, since: int) -> tuple[Tensor, Tensor]:
        """What to put into rows that were pulled after this `turn`, to have those of now: places
        among `ids`, and the rows there."""
        with self._lock:  # a row expires without an update
            found = None if self.spec.expire is not None else self._changes.among(ids, since)
            places = torch.from_numpy(np.arange(len(ids)) if found is None else found)
            ids = ids[places]
            rows, slots = self._read(self._index.find(ids.numpy()))
        return places, self._with_first_values(ids, rows, slots)

    @torch.no_grad()
    def push(
        self,
        ids: Tensor,
        gradients: Tensor,
        counts: Tensor | None = None,
        *,
        factor: float = 1.0,
        version: int | None = None,
        scale: float = 1.0,
    ) -> None:
        """The part of update `version` (the next, if not given) that is about these distinct ids.

        `gradients` count `scale` times. `counts` says how often each id occurred:
        once, if not given.
        """
        with self._lock:
            self.version = self.version + 1 if version is None else version
            if len(ids):
                self._update(ids, gradients, counts, factor, scale)
                self._changes.add(ids)
            if self.spec.expire is not None:
                self._sweep(max(_SWEEP, 2 * len(ids)))

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint. Large tensors are not copied: they are good until the next push."""
        with self._lock:
            used = slice(FIRST, self._index.high)
            found = {name: column[used] for name, column in self._memory.items()}
            if self._index.count < self._index.high - FIRST:
                there = found["seen"] > 0
                found = {name: column[there] for name, column in found.items()}
            if self._waiting is not None:
                found |= self._waiting.state()
            return found | {"facts": self._facts()}

    def blank(self) -> dict[str, Tensor]:
        """As `state` would be, without what is in it."""
        return blank(self.spec, self._index.count, self.waiting)

    def part(self, start: int, count: int) -> tuple[dict[str, Tensor], int | None]:
        """A piece of the state, of at most so many rows, and where the next one starts; good
        until the next push."""
        with self._lock:
            low, high = FIRST + start, FIRST + start + count
            found = {name: column[low:high] for name, column in self._used().items()}
            if self._index.count < self._index.high - FIRST:
                there = found["seen"] > 0
                found = {name: column[there] for name, column in found.items()}
            last = self._index.high
            if self._waiting is not None:
                found |= self._waiting.part(low, high)
                last = max(last, self._waiting.high)
            following = start + count if high < last else None
            return found | {"facts": self._facts()}, following

    def _used(self) -> dict[str, Tensor]:
        return {name: column[: self._index.high] for name, column in self._memory.items()}

    def _facts(self) -> Tensor:
        return torch.tensor([self.spec.seed, self.version])

    def load(self, state: Mapping[str, Tensor], *, more: bool = False) -> None:
        """Put this state in the place of all rows, or refuse it and change nothing.

        `more`: these rows are others of the same state, and go to those that are there.
        """
        check(self.spec, state)
        with self._lock:
            if not more:
                seed, self.version = state["facts"].tolist()
                self.spec = self.spec.model_copy(update={"seed": seed})
                self._start_over()
            for at in range(0, len(state["ids"]), _PIECE):
                part = slice(at, at + _PIECE)
                slots = torch.from_numpy(self._index.insert(state["ids"][part].numpy()))
                for name in self._memory.keys() - {"ids"}:
                    self._memory[name].index_copy_(0, slots, state[name][part])
            self._index.settle()
            if self._waiting is not None:
                self._waiting.load(dict(state))

    def _start_over(self) -> None:
        spec = self.spec
        self._initial = Initial(spec.seed, spec.name, spec.width, spec.std)
        self._memory = reserve(columns_of(spec))
        self._index = Index(self._memory["ids"])
        self._waiting = Waiting(spec.admit, spec.expire) if spec.admit > 1 else None
        self._seen = self._memory["seen"].numpy() if spec.expire is not None else None
        self._swept = FIRST
        self._recent: deque[_Pulled] = deque(maxlen=_RECENT)
        self._changes.all()

    def _read(self, slots: Ids, out: Tensor | None = None) -> tuple[Tensor, Ids]:
        """Rows, and the slots they are from: none for what has expired."""
        if self._seen is not None:
            slots = np.where(self._seen.take(slots) < self._horizon, NONE, slots)
        return torch.index_select(self._memory["rows"], 0, torch.from_numpy(slots), out=out), slots

    def _with_first_values(self, ids: Tensor, rows: Tensor, slots: Ids) -> Tensor:
        if self._waiting is None and self.spec.std and not slots.all():
            missing = torch.from_numpy(np.flatnonzero(slots == NONE))
            rows.index_copy_(0, missing, self._initial(ids[missing]))
        return rows

    def _slots(self, ids: Tensor) -> Ids:
        """As found when they were pulled, if they were: most batches come back as gradients."""
        for pulled, slots, removals in self._recent:
            if removals == self._index.removals and (pulled is ids or _same(pulled, ids)):
                found = slots.copy()
                if len(missing := np.flatnonzero(slots == NONE)):
                    found[missing] = self._index.find(ids.numpy()[missing])
                return found
        return self._index.find(ids.numpy())

    @property
    def _horizon(self) -> int:
        """Rows that were last seen before this version have expired."""
        assert self.spec.expire is not None
        return self.version - self.spec.expire

    def _update(
        self,
        ids: Tensor,
        gradients: Tensor,
        counts: Tensor | None,
        factor: float,
        scale: float,
    ) -> None:
        slots = self._slots(ids)
        if self._seen is not None:
            expired = (self._seen.take(slots) < self._horizon) & (slots != NONE)
            self._forget(slots[expired])
            slots[expired] = NONE
        known = slots != NONE
        if not (all_known := known.all()):
            slots[~known] = self._make(ids.numpy()[~known], counts, ~known)
            # Without admission, their gradients are those of their first values.
            all_known = self._waiting is None
        if self._seen is not None:
            self._seen[slots[slots != NONE]] = self.version
        if not all_known:
            gradients, slots = gradients[torch.from_numpy(known)], slots[known]
        at = torch.from_numpy(slots)
        apply_(self.spec.rule, self._memory, at, gradients, factor, scale)

    def _make(self, ids: Ids, counts: Tensor | None, which: np.ndarray) -> Ids:
        """Slots with first values for these ids; none for those that have to wait."""
        slots = np.zeros_like(ids)
        admitted: np.ndarray | slice = slice(None)
        if self._waiting is not None:
            often = np.ones_like(ids) if counts is None else counts.numpy()[which]
            admitted = self._waiting.admit(ids, often, self.version)
        slots[admitted] = self._index.insert(ids[admitted])
        made = torch.from_numpy(slots[admitted])
        self._memory["rows"].index_copy_(0, made, self._initial(torch.from_numpy(ids[admitted])))
        for name in self._kept:
            self._memory[name].index_fill_(0, made, 0)
        return slots

    @property
    def _kept(self) -> list[str]:
        return list(state_columns(self.spec.rule, self.spec.width))

    def _forget(self, slots: Ids) -> None:
        assert self._seen is not None
        self._index.remove(slots)
        self._seen[slots] = 0

    def _sweep(self, count: int) -> None:
        assert self._seen is not None
        start, stop = next_part(self._swept, count, self._index.high)
        seen = self._seen[start:stop]
        self._forget(start + np.flatnonzero((seen < self._horizon) & (seen > 0)))
        self._swept = stop
        if self._waiting is not None:
            self._waiting.sweep(self.version, count)


def _same(one: Tensor, other: Tensor) -> bool:
    """A trainer's ids come twice, as they were: comparing them takes less than finding them."""
    a, b = one.numpy(), other.numpy()
    return len(a) == len(b) > 0 and a[-1] == b[-1] and bool((a == b).all())


# --- changes ---
# Which rows the last updates were about: what was read a moment ago can be brought up to date.

_UPDATES = 32
_MOST = 1 << 20
"""Ids of all of them together."""


class Changes:
    """The ids of each update, the last few of them."""

    def __init__(self) -> None:
        self.turn = 0
        """Counts updates, and whatever else changes rows."""
        self._ids: deque[Ids] = deque()
        self._held = 0

    def add(self, ids: Tensor) -> None:
        """An update of these; the tensor must not change any more."""
        self.turn += 1
        self._ids.append(ids.numpy())
        self._held += len(ids)
        while len(self._ids) > _UPDATES or self._held > _MOST:
            self._held -= len(self._ids.popleft())

    def all(self) -> None:
        """Anything may be different now."""
        self.turn += 1
        self._ids.clear()
        self._held = 0

    def among(self, ids: Tensor, since: int) -> Ids | None:
        """Places of those that changed since that turn; None: nobody knows."""
        count = self.turn - since
        if not 0 <= count <= len(self._ids):
            return None
        wanted = ids.numpy()
        hit = np.zeros(len(wanted), np.bool_)
        for at in range(len(self._ids) - count, len(self._ids)):
            changed = self._ids[at]
            if not bool((changed[1:] > changed[:-1]).all()):
                return None
            near = np.searchsorted(changed, wanted)
            hit |= changed.take(near, mode="clip") == wanted
        return np.flatnonzero(hit)


# --- columns ---
# What is kept of a table, by name: for each row, and for each id that waits for one.

_WAITING = {
    "waiting_ids": Column(torch.int64),
    "waiting_counts": Column(torch.int32),
    "waiting_seen": Column(torch.int32),
}
_FACTS = {"facts": Column(torch.int64)}
"""Of the whole table: seed and version."""


def columns_of(spec: RowSpec) -> dict[str, Column]:
    return {
        "ids": Column(torch.int64),
        "rows": Column(torch.float32, spec.width),
        **state_columns(spec.rule, spec.width),
        **({} if spec.expire is None else {"seen": Column(torch.int32)}),
    }


def blank(spec: RowSpec, rows: int, waiting: int) -> dict[str, Tensor]:
    """A state of so many rows, without what is in it."""
    return {
        name: torch.empty(_shape(name, column, rows, waiting), dtype=column.dtype, device="meta")
        for name, column in _all(spec).items()
    }


def check(spec: RowSpec, state: Mapping[str, Tensor]) -> None:
    """Refuse a state that is not of such a table."""
    wanted = _all(spec)
    if odd := wanted.keys() ^ state.keys():
        raise CheckpointError(
            f"the saved rows of table {spec.name!r} do not fit: they differ in "
            f"{', '.join(sorted(odd))}; was it saved with another optimizer or other options?"
        )
    rows, waiting = len(state["ids"]), len(state.get("waiting_ids", ()))
    for name, column in wanted.items():
        found, shape = state[name], _shape(name, column, rows, waiting)
        if found.dtype != column.dtype or tuple(found.shape) != shape:
            raise CheckpointError(
                f"the saved rows of table {spec.name!r} do not fit: {name} is {found.dtype} "
                f"{tuple(found.shape)}, not {column.dtype} {shape}"
            )


def _all(spec: RowSpec) -> dict[str, Column]:
    return columns_of(spec) | (_WAITING if spec.admit > 1 else {}) | _FACTS


def _shape(name: str, column: Column, rows: int, waiting: int) -> tuple[int, ...]:
    size = 2 if name in _FACTS else waiting if name in _WAITING else rows
    return (size,) if column.width is None else (size, column.width)


# --- merge ---
# Gradients of the same rows from several places, added up.


class RowGradients(NamedTuple):
    """Distinct ids, the sum of the gradients of each, and how often each one occurred."""

    ids: Tensor
    sums: Tensor
    counts: Tensor


def merged(parts: Sequence[RowGradients]) -> RowGradients:
    """One for all of them. Their order does not matter but for rounding."""
    if len(parts) == 1:
        return parts[0]
    ids, where = np.unique(torch.cat([part.ids for part in parts]).numpy(), return_inverse=True)
    at = torch.from_numpy(where)
    values = torch.cat([part.sums for part in parts])
    sums = values.new_zeros(len(ids), values.shape[1]).index_add_(0, at, values)
    counts = torch.cat([part.counts for part in parts])
    total = counts.new_zeros(len(ids)).index_add_(0, at, counts)
    return RowGradients(torch.from_numpy(ids), sums, total)
