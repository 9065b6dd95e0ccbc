"""The rows of one table in this process's memory.

Any thread may read rows; only updates make and change them.

pull:  ids ─▶ slots ─▶ rows; an id without a row reads as its first values (as zeros if ids have to
       be admitted), and none is made
push:  ids ─▶ slots ─▶ new ids: counted, admitted, given a slot and first values
                    ─▶ the update rule, over all rows at once
       then a few other rows are looked at, and forgotten if they have expired
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

_SWEEP = 1 << 13
"""Slots at least that each push checks for expired rows."""
_PIECE = 1 << 20
"""Rows that are loaded at a time."""
_RECENT = 8
"""Pulls whose slots are remembered for the push of the same ids."""


class Rows:
    """The rows of one table, or of one server's part of it. Thread-safe."""

    remote = False

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.version = 0
        """The last update that was applied."""
        self._lock = threading.Lock()
        self._changes = Changes()
        self._start_over()

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

    def __len__(self) -> int:
        return self._index.count

    @property
    def waiting(self) -> int:
        """Number of ids that are counted but not admitted yet."""
        return 0 if self._waiting is None else len(self._waiting)

    @property
    def turn(self) -> int:
        """Number of the last change: rows that are pulled from now on include it."""
        return self._changes.turn

    @torch.no_grad()
    def pull(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the row of each id, [n, width]. Changes nothing.

        A push of the same ids is spared the search, so the tensor `ids` must not change until then.
        """
        with self._lock:
            slots = self._index.find(ids.numpy())
            self._recent.appendleft(_Pulled(ids, slots, self._index.removals))
            rows, slots = self._read(slots, out)
        return self._with_first_values(ids, rows, slots)

    def own(self, ids: Tensor) -> Tensor:
        """Return ids that will not change, for ids in memory that another process may write to: a
        copy, or the equal ids of a recent pull."""
        for pulled in tuple(self._recent):  # other threads pull meanwhile
            if _same(pulled.ids, ids):
                return pulled.ids
        return ids.clone()

    def expect(self, ids: Tensor) -> None:
        """Do nothing: the rows are in this process already."""

    @torch.no_grad()
    def changes(self, ids: Tensor, since: int) -> tuple[Tensor, Tensor]:
        """Return how to bring rows up to date that were pulled at this `turn`: indices into `ids`,
        and the rows for them."""
        with self._lock:
            # If rows expire, they also change without an update: return all of them.
            found = None if self.spec.expire is not None else self._changes.among(ids, since)
            places = torch.from_numpy(np.arange(len(ids)) if found is None else found)
            ids = ids[places]
            rows, slots = self._read(self._index.find(ids.numpy()))
        return places, self._with_first_values(ids, rows, slots)

    def _read(self, slots: Ids, out: Tensor | None = None) -> tuple[Tensor, Ids]:
        """Return the rows at these slots, and the slots, with NONE for expired rows."""
        if self._seen is not None:
            slots = np.where(self._seen.take(slots) < self._horizon, NONE, slots)
        return torch.index_select(self._memory["rows"], 0, torch.from_numpy(slots), out=out), slots

    def _with_first_values(self, ids: Tensor, rows: Tensor, slots: Ids) -> Tensor:
        if self._waiting is None and self.spec.std and not slots.all():
            missing = torch.from_numpy(np.flatnonzero(slots == NONE))
            rows.index_copy_(0, missing, self._initial(ids[missing]))
        return rows

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
        """Apply the part of update `version` (default: the next one) for these distinct ids.

        `gradients` count `scale` times; `factor` multiplies the learning rate. `counts`: how often
        each id occurred (default: once).
        """
        with self._lock:
            self.version = self.version + 1 if version is None else version
            if len(ids):
                self._update(ids, gradients, counts, factor, scale)
                self._changes.add(ids)
            if self.spec.expire is not None:
                self._sweep(max(_SWEEP, 2 * len(ids)))

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

    def _slots(self, ids: Tensor) -> Ids:
        """Return the slots of these ids, from a recent pull if there was one: most batches come
        back as gradients."""
        for pulled, slots, removals in self._recent:
            if removals == self._index.removals and (pulled is ids or _same(pulled, ids)):
                found = slots.copy()
                if len(missing := np.flatnonzero(slots == NONE)):
                    found[missing] = self._index.find(ids.numpy()[missing])
                return found
        return self._index.find(ids.numpy())

    def _make(self, ids: Ids, counts: Tensor | None, which: np.ndarray) -> Ids:
        """Return new slots with first values for these ids; NONE for those that have to wait."""
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

    @property
    def _horizon(self) -> int:
        """Rows that no update has touched since this version have expired."""
        assert self.spec.expire is not None
        return self.version - self.spec.expire

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, good until the next push: large tensors are not
        copied."""
        with self._lock:
            used = slice(FIRST, self._index.high)
            found = {name: column[used] for name, column in self._memory.items()}
            if self._index.count < self._index.high - FIRST:
                there = found["seen"] > 0
                found = {name: column[there] for name, column in found.items()}
            if self._waiting is not None:
                found |= self._waiting.state()
            return found | {"facts": self._facts()}

    def part(self, start: int, count: int) -> tuple[dict[str, Tensor], int | None]:
        """Return the part of the state that begins at `start`, of at most `count` rows, and where
        the next part starts (None after the last). Good until the next push."""
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

    def blank(self) -> dict[str, Tensor]:
        """Return the state's shapes and types, in tensors without memory."""
        return blank(self.spec, self._index.count, self.waiting)

    def load(self, state: Mapping[str, Tensor], *, more: bool = False) -> None:
        """Replace all rows by this state. Raises CheckpointError, with nothing changed, if it does
        not fit.

        `more`: add rows of another part of the same state instead.
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


class _Pulled(NamedTuple):
    """The slots of a recent pull, and the number of removals before it: they are good while that
    number does not change."""

    ids: Tensor
    slots: Ids
    removals: int


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether the ids are equal. Comparing them takes less time than finding them."""
    a, b = one.numpy(), other.numpy()
    return len(a) == len(b) > 0 and a[-1] == b[-1] and bool((a == b).all())


# Rows that changed lately

_UPDATES = 32
_MOST = 1 << 20
"""Ids of all kept updates together."""


class Changes:
    """The ids of the last few updates, to bring rows up to date that were pulled before them."""

    def __init__(self) -> None:
        self.turn = 0
        """Counts updates, and all else that changes rows."""
        self._ids: deque[Ids] = deque()
        self._held = 0

    def add(self, ids: Tensor) -> None:
        """Note an update of these ids. The tensor must not change any more."""
        self.turn += 1
        self._ids.append(ids.numpy())
        self._held += len(ids)
        while len(self._ids) > _UPDATES or self._held > _MOST:
            self._held -= len(self._ids.popleft())

    def all(self) -> None:
        """Note that any row may have changed."""
        self.turn += 1
        self._ids.clear()
        self._held = 0

    def among(self, ids: Tensor, since: int) -> Ids | None:
        """Return the indices of those `ids` that changed since that turn; None if that is not
        known."""
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


# The form of a table's state

_WAITING = {
    "waiting_ids": Column(torch.int64),
    "waiting_counts": Column(torch.int32),
    "waiting_seen": Column(torch.int32),
}
_FACTS = {"facts": Column(torch.int64)}
"""Numbers of the whole table: seed and version."""


def columns_of(spec: RowSpec) -> dict[str, Column]:
    """Return what a table keeps for each row, by name."""
    return {
        "ids": Column(torch.int64),
        "rows": Column(torch.float32, spec.width),
        **state_columns(spec.rule, spec.width),
        **({} if spec.expire is None else {"seen": Column(torch.int32)}),
    }


def blank(spec: RowSpec, rows: int, waiting: int) -> dict[str, Tensor]:
    """Return the shapes and types of a state with so many rows, in tensors without memory."""
    return {
        name: torch.empty(_shape(name, column, rows, waiting), dtype=column.dtype, device="meta")
        for name, column in _all(spec).items()
    }


def check(spec: RowSpec, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a state is not of such a table."""
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


# Gradients of rows


class RowGradients(NamedTuple):
    """Distinct ids, the sum of the gradients of each, and how often each one occurred."""

    ids: Tensor
    sums: Tensor
    counts: Tensor


def merged(parts: Sequence[RowGradients]) -> RowGradients:
    """Add up gradients of the same rows from several places. Their order matters only for
    rounding."""
    if len(parts) == 1:
        return parts[0]
    ids, where = np.unique(torch.cat([part.ids for part in parts]).numpy(), return_inverse=True)
    at = torch.from_numpy(where)
    values = torch.cat([part.sums for part in parts])
    sums = values.new_zeros(len(ids), values.shape[1]).index_add_(0, at, values)
    counts = torch.cat([part.counts for part in parts])
    total = counts.new_zeros(len(ids)).index_add_(0, at, counts)
    return RowGradients(torch.from_numpy(ids), sums, total)
