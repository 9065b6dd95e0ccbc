"""Tables whose rows live on servers, as one trainer sees them: every id belongs to one shard.

pull   ids ─▶ by shard ─▶ asked of all ─▶ answers, in the order of the ids
push   gradients are kept; the next push of the dense ones takes them along, shard by shard
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.comm.servers.link import Link
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.row_messages import (
    PIECE,
    RowHead,
    blank_state,
    outline,
    pack_rows,
    pieces,
)
from echelon.core.errors import PeerError
from echelon.core.hashing import words
from echelon.core.rows import RowSpec

_KEY = 0x54A12D
_HALF = np.uint64(32)
State = dict[str, Tensor]
Insist = Callable[[Callable[[], None]], None]


class Staged(NamedTuple):
    """What the next push takes along."""

    ids: Tensor
    sums: Tensor
    counts: Tensor | None


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
        ordered = values if self.order is None else values.index_select(0, self.order)
        return torch.split(ordered, self.sizes)


def shard_of(ids: Tensor, shards: int) -> NDArray[np.int64]:
    """Evenly, whatever the ids are."""
    high = words(ids.numpy().view(np.uint64), _KEY) >> _HALF
    return (high * np.uint64(shards) >> _HALF).view(np.int64)


class RemoteTables:
    """All tables of a model; `links` are those of the servers, while there are any."""

    def __init__(self, specs: Sequence[RowSpec]) -> None:
        self.specs = list(specs)
        self.links: Sequence[Link] = ()
        self._staged: dict[int, Staged] = {}
        self._loaded: dict[int, Mapping[str, Tensor]] = {}
        self._ahead: list[tuple[int, list[list[Tensor]]]] = []
        self._seq = 0
        self.insist: Insist = lambda question: question()
        """Asks again where a shard was lost and another process took its place."""

    def store(self, at: int) -> RemoteRows:
        return RemoteRows(self, at)

    def pull(self, at: int, ids: Tensor) -> Tensor:
        if not self.links:
            raise PeerError("this member is not connected to the servers")
        width = self.specs[at].width
        rows = torch.empty(len(ids), width)
        step = max(1, PIECE // (4 * width))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            self.insist(lambda part=part: self._pull(at, ids[part], rows[part]))  # type: ignore[misc]
        return rows

    def stage(self, at: int, gradients: Staged) -> None:
        self._staged[at] = gradients

    def prepare(self, seq: int) -> None:
        """What is staged is part of push `seq`, and goes ahead of it to every shard."""
        staged, self._staged = self._staged, {}
        self._ahead = [(at, self._parts(at, gradients)) for at, gradients in staged.items()]
        self._seq = seq

    def send(self, link: Link) -> None:
        """This link's part; again, if another process took the shard's place."""
        for at, parts in self._ahead:
            if len(parts[link.address.index][0]):
                self._send(link, self._seq, at, parts[link.address.index])

    def _parts(self, at: int, gradients: Staged) -> list[list[Tensor]]:
        """Per shard: ids, sums and, where they matter, counts."""
        sharing = Sharing.of(gradients.ids, len(self.links))
        counts = gradients.counts if self.specs[at].admit > 1 else None
        columns = (gradients.ids, gradients.sums, counts)
        divided = [sharing.parts(column) for column in columns if column is not None]
        return [list(parts) for parts in zip(*divided, strict=True)]

    def drop(self) -> None:
        self._staged.clear()

    def load(self, at: int, state: Mapping[str, Tensor]) -> None:
        """Kept until somebody uploads it."""
        self._loaded[at] = state

    def upload(self) -> None:
        """To servers whose tables are empty: after an upload of the rest."""
        loaded, self._loaded = self._loaded, {}
        for at, state in loaded.items():
            what = f"the rows of table {self.specs[at].name!r} being taken"
            for shard, link in enumerate(self.links):
                more = False
                for part in pieces(_part(state, shard, len(self.links))):
                    head = {"table": at, "more": more, "outline": outline(part)}
                    link.ask(Kind.ROW_LOAD, head, list(part.values()), what)
                    more = True

    def state(self, at: int) -> State:
        """All shards' rows, while nobody pushes; each comes straight to its place."""
        what = f"the rows of table {self.specs[at].name!r}"
        head = {"table": at, "whole": False}
        lines = [
            link.ask(Kind.ROW_STATE, head, what=what).fields().get("outline") for link in self.links
        ]
        blanks = [blank_state(line, None, "meta") for line in lines]
        whole = _joined(blanks)
        starts = dict.fromkeys(whole, 0)
        for link, blank in zip(self.links, blanks, strict=True):
            link.ask(Kind.ROW_STATE, {"table": at, "whole": True}, what=what)
            link.take([_next(whole, starts, name, len(part)) for name, part in blank.items()], what)
        return whole

    def _pull(self, at: int, ids: Tensor, rows: Tensor) -> None:
        sharing = Sharing.of(ids, len(self.links))
        what = f"rows of table {self.specs[at].name!r}"
        asked = [
            (link, len(part))
            for link, part in zip(self.links, sharing.parts(ids), strict=True)
            if len(part) and self._ask(link, at, part, what)
        ]
        into = rows if sharing.order is None else torch.empty_like(rows)
        start = 0
        for link, count in asked:
            link.answer(what)
            link.take([into[start : start + count]], what)
            link.pulled += into[start : start + count].nbytes
            start += count
        if sharing.order is not None:
            rows.index_copy_(0, sharing.order, into)

    def _ask(self, link: Link, at: int, ids: Tensor, what: str) -> bool:
        link.begin(Kind.ROWS, pack_rows(RowHead(at, len(ids))), [ids], what)
        return True

    def _send(self, link: Link, seq: int, at: int, parts: Sequence[Tensor]) -> None:
        step = max(1, PIECE // (4 * self.specs[at].width))
        for start in range(0, len(parts[0]), step):
            ids, sums, *counts = (part[start : start + step] for part in parts)
            head = pack_rows(RowHead(at, len(ids), bool(counts), start > 0))
            body = [ids, sums, *(count.int() for count in counts)]
            link.send(Kind.ROW_GRADIENTS, head, body, seq=seq, what="gradients of rows")
            link.pushed += sum(part.nbytes for part in body)


class RemoteRows:
    """One table's `RowStore`."""

    remote = True

    def __init__(self, tables: RemoteTables, at: int) -> None:
        self._tables, self._at = tables, at

    def pull(self, ids: Tensor) -> Tensor:
        return self._tables.pull(self._at, ids)

    def push(
        self,
        ids: Tensor,
        gradients: Tensor,
        counts: Tensor | None = None,
        *,
        factor: float = 1.0,  # noqa: ARG002 (the servers know the schedule)
        version: int | None = None,  # noqa: ARG002 (and count versions)
    ) -> None:
        self._tables.stage(self._at, Staged(ids, gradients, counts))

    def state(self) -> State:
        return self._tables.state(self._at)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._tables.load(self._at, state)


def _part(state: Mapping[str, Tensor], shard: int, shards: int) -> State:
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


def _joined(blanks: Sequence[State]) -> State:
    """Room for all shards' rows; what is said of the whole table is said by each."""
    return {
        name: torch.empty(
            value.shape
            if name == "facts"
            else (sum(len(part[name]) for part in blanks), *value.shape[1:]),
            dtype=value.dtype,
        )
        for name, value in blanks[0].items()
    }


def _next(whole: State, starts: dict[str, int], name: str, size: int) -> Tensor:
    """The place of a shard's part, behind those before it."""
    if name == "facts":
        return whole[name]
    start = starts[name]
    starts[name] += size
    return whole[name][start : start + size]
