"""Rows of tables at a shard: what is staged is applied with its push, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.ps.messages import Kind, RowHead, blank_state, outline, pack_rows, unpack_rows
from echelon.comm.ps.row_memory import (
    AHEAD,
    AREAS,
    PULLS,
    PUSHES,
    carve,
    pull_shapes,
    push_shapes,
    room_for,
)
from echelon.comm.ps.rows import RemoteTables, Sharing, shard_of
from echelon.core.errors import PeerError
from echelon.core.types import RowRule, RowSpec
from echelon.server.decisions import Entry, Staged
from echelon.server.sessions import RowTalk
from echelon.server.shard import Shard
from echelon.server.weights import Tables

HEAD = RowHead(0, 2)
SPEC = RowSpec(name="t", width=2, seed=0, std=0.0, rule=RowRule(name="sgd", lr=1.0))


def tables(**options: Any) -> Tables:
    return Tables([SPEC.model_copy(update=options).model_dump(mode="json")])


def body(ids: list[int], value: float, counts: list[int] | None = None) -> list[Tensor]:
    found = [torch.tensor(ids), torch.full((len(ids), 2), value)]
    return found if counts is None else [*found, torch.tensor(counts, dtype=torch.int32)]


def row(held: Tables, key: int) -> float:
    return float(held.pull(0, torch.tensor([key]))[0, 0])


def entry(version: int, *pushes: tuple[int, int], **options: Any) -> Entry:
    return Entry(version, version, tuple(Staged(*push) for push in pushes), **options)


def apply(held: Tables, update: Entry, scale: float) -> None:
    """As a shard does."""
    held.repeat(update, held.summed(update), scale)


def test_pushes_of_one_update_are_added_up_and_scaled() -> None:
    held = tables()
    held.stage(0, 7, HEAD, body([1, 2], 1.0))
    held.stage(1, 9, HEAD, body([2, 3], 2.0))
    apply(held, entry(1, (0, 7), (1, 9), factor=0.5), scale=0.5)
    assert [row(held, key) for key in (1, 2, 3)] == [-0.25, -0.75, -0.5]
    apply(held, entry(2, (0, 7)), scale=1.0)
    assert row(held, 1) == -0.25, "nothing is applied twice"


def test_what_is_staged_for_another_push_is_left_alone() -> None:
    held = tables()
    held.stage(0, 7, HEAD, body([1], 1.0))
    held.stage(0, 8, HEAD, body([2], 1.0))  # the first one came to nothing
    apply(held, entry(1, (0, 7)), scale=1.0)
    assert (row(held, 1), row(held, 2)) == (0, 0)
    apply(held, entry(2, (0, 8)), scale=1.0)
    assert (row(held, 1), row(held, 2)) == (0, -1)
    held.stage(3, 1, HEAD, body([5], 1.0))
    held.forget(3)
    apply(held, entry(3, (3, 1)), scale=1.0)
    assert row(held, 5) == 0


def test_messages_of_one_push_belong_together() -> None:
    held = tables()
    held.stage(0, 1, HEAD, body([1, 2], 1.0))
    held.stage(0, 1, RowHead(0, 1, more=True), body([3], 1.0))
    assert held.reduce([Staged(0, 1)]) == 6
    apply(held, entry(1, (0, 1), measured=True), scale=2.0)
    assert [row(held, key) for key in (1, 2, 3)] == [-2, -2, -2]


def test_a_push_that_is_sent_again_is_staged_once() -> None:
    held = tables()
    for _ in range(2):
        held.stage(0, 1, HEAD, body([1], 1.0))
        held.stage(0, 1, RowHead(0, 1, more=True), body([2], 1.0))
    apply(held, entry(1, (0, 1)), scale=1.0)
    assert (row(held, 1), row(held, 2)) == (-1, -1)


def test_values_are_clipped_after_they_are_scaled() -> None:
    held = tables()
    held.stage(0, 1, HEAD, body([1], 3.0))
    apply(held, entry(1, (0, 1), limit=0.5), scale=0.1)
    assert row(held, 1) == pytest.approx(-0.3)
    held.stage(0, 2, HEAD, body([1], 30.0))
    apply(held, entry(2, (0, 2), limit=0.5), scale=0.1)
    assert row(held, 1) == pytest.approx(-0.8)


def test_occurrences_are_counted_over_trainers() -> None:
    held = tables(admit=3)
    held.stage(0, 1, HEAD, body([1, 2], 1.0, [1, 1]))
    held.stage(1, 1, HEAD, body([1], 1.0, [2]))
    apply(held, entry(1, (0, 1), (1, 1)), scale=1.0)
    assert held.figures() == {"rows_t": 1, "waiting_t": 1}


def test_versions_pass_for_rows_that_are_not_in_them() -> None:
    held = tables(expire=2)
    held.stage(0, 1, HEAD, body([1], 1.0))
    apply(held, entry(1, (0, 1)), scale=1.0)
    for version in (2, 3, 4):
        apply(held, entry(version, (0, version)), scale=1.0)
    assert row(held, 1) == 0
    assert held.figures()["rows_t"] == 0


@pytest.mark.parametrize(
    "specs", ["t", [{}], [{"name": "a b"}], [SPEC.model_dump(mode="json")] * 257]
)
def test_a_set_up_that_makes_no_sense_is_refused(specs: Any) -> None:
    with pytest.raises(PeerError, match="table"):
        Tables(specs)


def test_gradients_that_make_no_sense_are_refused() -> None:
    held = tables()
    assert [part.shape for part in held.blank(RowHead(0, 3, True), 3 * 20)] == [(3,), (3, 2), (3,)]
    with pytest.raises(PeerError, match="gradients of 3 rows in 47 bytes"):
        held.blank(RowHead(0, 3), 47)
    with pytest.raises(PeerError, match="gradients of 0 rows"):
        held.blank(RowHead(0, 0), 0)
    with pytest.raises(PeerError, match="asks for table 1 of 1"):
        held.blank(RowHead(1, 3), 48)
    with pytest.raises(PeerError, match="ids are not in order"):
        held.stage(0, 1, HEAD, body([2, 2], 1.0))


def test_heads_come_back_as_they_were() -> None:
    head = RowHead(3, 70_000, True, True)
    assert unpack_rows(pack_rows(head)) == head
    with pytest.raises(PeerError, match="a head of 3 bytes about rows"):
        unpack_rows(b"abc")


def test_an_outline_says_what_follows() -> None:
    state = {"ids": torch.arange(3), "rows": torch.zeros(3, 2)}
    blank = blank_state(outline(state), 3 * 8 + 6 * 4)
    assert {n: (v.shape, v.dtype) for n, v in blank.items()} == {
        n: (v.shape, v.dtype) for n, v in state.items()
    }
    with pytest.raises(PeerError, match="have 7 bytes, their outline says 48"):
        blank_state(outline(state), 7)


@pytest.mark.parametrize(
    "lines",
    [None, [], [["a"]], [["a", "object", 3]], [["a", "int64", -1]], [["a", "int64", 1, 2, 3]]],
)
def test_an_outline_that_makes_no_sense_is_refused(lines: Any) -> None:
    with pytest.raises(PeerError, match="outline"):
        blank_state(lines, 8)


def test_ids_are_shared_evenly_and_stay_in_order() -> None:
    ids = torch.arange(30_000) * 1024
    owner = shard_of(ids, 3)
    assert abs(float((owner == 1).mean()) - 1 / 3) < 0.02
    sharing = Sharing.of(ids, 3)
    parts = sharing.parts(ids)
    assert all(bool((part[1:] > part[:-1]).all()) for part in parts)
    assert [len(part) for part in parts] == sharing.sizes
    assert sorted(torch.cat(list(parts)).tolist()) == ids.tolist()


def test_nobody_to_ask() -> None:
    with pytest.raises(PeerError, match="not connected to the servers"):
        RemoteTables([SPEC]).store(0).pull(torch.tensor([1]))


def test_shared_memory_is_carved_within_its_bounds() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    shapes = push_shapes(3, 2, counted=True)
    ids, sums, counts = carve(memory, 64, shapes)
    assert (ids.shape, sums.shape, counts.shape) == ((3,), (3, 2), (3,))
    sums.fill_(1.0)
    assert int(memory.count_nonzero()) == 2 * 6, "it is the memory itself"
    for place in (1, 960, 1 << 60):
        with pytest.raises(PeerError, match="bytes of shared memory"):
            carve(memory, place, shapes)
    with pytest.raises(PeerError, match="bytes of shared memory"):
        carve(memory, 0, pull_shapes(1 << 31, 64))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 17])
@pytest.mark.parametrize("size", [0, 1, 5, 16])
def test_what_lies_in_shared_memory_does_not_overlap(size: int, width: int) -> None:
    shapes = push_shapes(size, width, counted=True)
    memory = torch.zeros(64 + room_for(shapes), dtype=torch.uint8)
    parts = carve(memory, 64, shapes)
    assert [part.dtype for part in parts] == [torch.int64, torch.float32, torch.int32]
    for number, part in enumerate(parts, 1):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == ([[1], [2], [3]] if size else [[], [], []])
    assert not memory[:64].any()
    with pytest.raises(PeerError, match="bytes of shared memory"):
        carve(memory, 128, shapes)


class _Shared:
    """A trainer on this host, as a shard's thread hears it."""

    def __init__(self, held: Tables) -> None:
        shard = SimpleNamespace(tables=held)
        connection = SimpleNamespace(send=lambda *_, **__: None)
        self.areas = {number: torch.zeros(1 << 12, dtype=torch.uint8) for number in range(AREAS)}
        self.talk = RowTalk(cast(Shard, shard), cast(Connection, connection), memory=True)
        self.talk._areas = self.areas

    def pull(self, ids: list[int], area: int = PULLS) -> None:
        there, _ = carve(self.areas[area], 0, pull_shapes(len(ids), 2))
        there.copy_(torch.tensor(ids))
        self.talk.rows(self._frame(Kind.ROWS, RowHead(0, len(ids), shared=True, area=area)))

    def push(self, ids: list[int], value: float) -> tuple[Tensor, Tensor]:
        found, sums = carve(self.areas[PUSHES], 0, push_shapes(len(ids), 2, counted=False))
        found.copy_(torch.tensor(ids))
        head = RowHead(0, len(ids), shared=True)
        self.talk.gradients(self._frame(Kind.ROW_GRADIENTS, head), member=0)
        sums.fill_(value)
        return found, sums

    def _frame(self, kind: Kind, head: RowHead) -> Frame:
        return Frame(kind, 1, pack_rows(head), 0)


@pytest.mark.parametrize("area", [PULLS, AHEAD])
def test_a_trainer_that_writes_to_its_memory_again_changes_no_ids(area: int) -> None:
    held = tables()
    trainer = _Shared(held)
    trainer.pull([1, 2], area)
    trainer.pull([3, 4], area)  # at the same place
    found, _ = trainer.push([1, 2], 1.0)
    found.fill_(8)
    apply(held, entry(1, (0, 1)), scale=1.0)
    assert [row(held, key) for key in (1, 2, 3, 4, 8)] == [-1, -1, 0, 0, 0]
    trainer.pull([1, 2], area)
    trainer.pull([5, 6], area)
    found, _ = trainer.push([3, 4], 1.0)  # pulled a while ago
    found.fill_(8)
    apply(held, entry(2, (0, 1)), scale=1.0)
    assert [row(held, key) for key in (1, 2, 3, 4, 5, 6, 8)] == [-1, -1, -1, -1, 0, 0, 0]


def test_ids_of_a_pull_are_looked_at_as_all_others_are() -> None:
    trainer = _Shared(tables())
    trainer.pull([2, 1])
    with pytest.raises(PeerError, match="ids are not in order"):
        trainer.push([2, 1], 1.0)
