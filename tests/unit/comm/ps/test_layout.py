"""Where parameters lie, and which shard holds what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.comm.ps.layout import ALIGN, BadLayout, Layout, Partition

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def layout_of(sizes: list[tuple[int, ...]], dtypes: list[torch.dtype] | None = None) -> Layout:
    kinds = dtypes or [torch.float32] * len(sizes)
    parameters = [torch.zeros(s, dtype=d) for s, d in zip(sizes, kinds, strict=True)]
    flags = [len(size) > 1 for size in sizes]
    return Layout.of([f"p{at}" for at in range(len(sizes))], parameters, flags)


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


@given(parameters)
def test_slots_do_not_overlap_and_begin_at_cache_lines(
    given_: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    layout = layout_of([s for s, _ in given_], [d for _, d in given_])
    for at, flat in enumerate(layout.flats):
        end = 0
        for slot in (slot for slot in layout.slots if slot.flat == at):
            assert slot.start >= end
            assert slot.start * flat.dtype.itemsize % ALIGN == 0
            end = slot.stop
        assert end <= flat.size
        assert flat.bytes % ALIGN == 0


@given(parameters, st.integers(1, 5))
def test_shards_hold_every_value_once_in_even_shares(
    given_: list[tuple[tuple[int, ...], torch.dtype]], shards: int
) -> None:
    layout = layout_of([s for s, _ in given_], [d for _, d in given_])
    partition = Partition(layout, shards)
    flats = layout.empty()
    for shard in range(shards):
        for held in partition.cut(shard, flats):
            held += 1
    assert all(bool((flat == 1).all()) for flat in flats)
    sizes = [partition.bytes(shard) for shard in range(shards)]
    assert max(sizes) - min(sizes) <= ALIGN


@given(parameters, st.integers(1, 4))
def test_pieces_of_a_parameter_make_up_all_of_it(
    given_: list[tuple[tuple[int, ...], torch.dtype]], shards: int
) -> None:
    layout = layout_of([s for s, _ in given_], [d for _, d in given_])
    partition = Partition(layout, shards)
    flats = layout.empty()
    for place in layout.views(flats):
        place.copy_(torch.arange(place.numel()).view(place.shape))
    held = [partition.cut(shard, flats) for shard in range(shards)]
    for at, slot in enumerate(layout.slots):
        found = [
            held[piece.shard][piece.range][piece.offset : piece.offset + piece.size]
            for piece in partition.pieces(at)
        ]
        whole = torch.cat(found) if found else torch.empty(0, dtype=slot.dtype)
        assert torch.equal(whole, torch.arange(slot.size).to(slot.dtype))


def test_carved_memory_is_the_ranges_one_behind_the_other() -> None:
    layout = layout_of([(7, 9), (5,)], [torch.float64, torch.bfloat16])
    partition = Partition(layout, 1)
    memory = torch.zeros(partition.bytes(0), dtype=torch.uint8)
    for at, held in enumerate(partition.carve(0, memory)):
        held.fill_(at + 1)
    again = partition.carve(0, memory)
    assert [held.dtype for held in again] == partition.dtypes(0)
    assert [held.unique().tolist() for held in again] == [[1.0], [2.0]]


def test_a_parameter_lies_as_in_the_model() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    gappy = torch.randn(6, 8)[:, ::2]
    layout = Layout.of(["a", "b"], [weight, gappy], [True, True])
    views = layout.views(layout.empty())
    assert views[0].stride() == weight.stride()
    assert views[1].is_contiguous()
    assert views[1].shape == gappy.shape


def test_a_layout_survives_the_wire() -> None:
    weight: Tensor = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = Layout.of(
        ["a", "b", "c"], [weight, torch.zeros(()), torch.zeros(0, 3)], [True, False, True]
    )
    again = Layout.from_json(layout.to_json())
    assert again.slots == layout.slots
    assert again.flats == layout.flats
    assert again.digest() == layout.digest()
    other = Layout.of(
        ["a", "b", "d"], [weight, torch.zeros(()), torch.zeros(0, 3)], [True, False, True]
    )
    assert other.digest() != layout.digest()


GOOD = ["w", [2, 3], [3, 1], "float32", True]


def changed(at: int, value: Any) -> list[Any]:
    row = copy.deepcopy(GOOD)
    row[at] = value
    return row


@pytest.mark.parametrize(
    "row",
    [
        changed(0, ""),
        changed(0, "n" * 2000),
        changed(0, 3),
        changed(1, [2, -3]),
        changed(1, [2, True]),
        changed(1, [2.0, 3]),
        changed(1, [1 << 60, 1 << 60]),
        changed(2, [1, 1]),
        changed(2, [4, 1]),
        changed(2, [3, 1, 1]),
        changed(2, [6, 2]),
        changed(3, "int64"),
        changed(4, 1),
        GOOD[:4],
        {},
        None,
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused(row: Any) -> None:
    with pytest.raises(BadLayout, match="parameter 1 of a layout"):
        Layout.from_json([GOOD, row])


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        ([], "must be a list of 1"),
        ({}, "must be a list of 1"),
        ([GOOD, GOOD], "same name twice"),
        ([["w", [1 << 42, 2], [2, 1], "float32", True]], "more than"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(plain: Any, why: str) -> None:
    with pytest.raises(BadLayout, match=why):
        Layout.from_json(plain)
