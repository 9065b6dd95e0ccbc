"""A shard's part of all tables: rows by id, and what trainers have staged for them.

Staged gradients are part of a push: they are applied with it, by the same entry, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from echelon.comm.servers.row_messages import MOST_TABLES, PIECE, RowHead, outline
from echelon.core.errors import PeerError
from echelon.core.types import RowSpec
from echelon.optim.tables import RowGradients, Rows, merged
from echelon.server.entry import Entry, Staged

_Parts = dict[int, list[RowGradients]]
Sums = dict[int, RowGradients]


class Tables:
    """Of one shard. `apply` is called in the gate's order; pulls come from any thread."""

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
        """Whether these are the rows of one of the tables still."""
        return any(held is rows for rows in self._rows)

    def blank(self, head: RowHead, size: int) -> list[Tensor]:
        """Room for a message of gradients: ids, sums and perhaps counts."""
        width = self.at(head.table).spec.width
        each = 8 + 4 * width + (4 if head.counted else 0)
        if not head.size or size != head.size * each:
            raise PeerError(f"gradients of {head.size} rows in {size:,} bytes")
        body = [torch.empty(head.size, dtype=torch.int64), torch.empty(head.size, width)]
        return [*body, torch.empty(head.size, dtype=torch.int32)] if head.counted else body

    def stage(self, member: int, seq: int, head: RowHead, body: Sequence[Tensor]) -> None:
        """A message of `blank`'s form is here. A push that is sent again is staged once."""
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

    def reduce(self, pushes: Sequence[Staged]) -> float:
        """Add up what these pushes brought; returns the square of the sums' norm."""
        self._sum_up(pushes)
        return sum(float(found.sums.double().square().sum()) for found in self._summed.values())

    def _sum_up(self, pushes: Sequence[Staged]) -> None:
        parts: _Parts = {}
        for push in pushes:
            seq, held = self._staged.get(push.member, (push.seq, {}))
            if seq == push.seq:
                for table, found in held.items():
                    parts.setdefault(table, []).extend(found)
        self._summed = {table: merged(found) for table, found in parts.items()}

    def summed(self, entry: Entry) -> Sums:
        """What an entry's pushes brought, by table."""
        if not entry.measured:
            self._sum_up(entry.pushes)
        return self._summed

    def repeat(self, entry: Entry, sums: Sums, scale: float) -> None:
        """What the shard did whose twin this is."""
        self._summed = sums
        self._update(entry, scale)

    def apply(self, entry: Entry, scale: float) -> None:
        """Every table comes to the entry's version, whether it has rows in it or not."""
        self.summed(entry)
        self._update(entry, scale)

    def _update(self, entry: Entry, scale: float) -> None:
        for at, rows in enumerate(self._rows):
            ids, sums, counts = self._summed.get(at) or _nothing(rows.spec.width)
            if entry.limit is not None:
                sums.mul_(scale).clamp_(-entry.limit, entry.limit)
            once = scale if entry.limit is None else 1.0
            rows.push(ids, sums, counts, factor=entry.factor, version=entry.version, scale=once)
        self._summed = {}
        for push in entry.pushes:
            self.forget(push.member, push.seq)

    def forget(self, member: int, seq: int | None = None) -> None:
        held = self._staged.get(member)
        if held is not None and (seq is None or held[0] <= seq):
            del self._staged[member]

    def pieces(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """All rows of all tables, for `load`: heads and bodies of messages."""
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
        """Room for what `lengths` says of another one's sums."""
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

    def at(self, table: int) -> Rows:
        if not 0 <= table < len(self._rows):
            raise PeerError(f"asks for table {table} of {len(self._rows)}")
        return self._rows[table]


def _nothing(width: int) -> RowGradients:
    none = torch.empty(0, dtype=torch.int64)
    return RowGradients(none, torch.empty(0, width), none)


def lengths(sums: Sums) -> list[list[int]]:
    return [[at, len(found.ids)] for at, found in sums.items()]


def flat(sums: Sums) -> list[Tensor]:
    return [tensor for found in sums.values() for tensor in found]
