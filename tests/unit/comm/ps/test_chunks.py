"""Chunks of a push, put together from gradients that lie anywhere."""

from __future__ import annotations

import pytest
import torch

from echelon.comm.ps import layout as chunks
from echelon.comm.ps.layout import GAP, Cutting, Layout, Partition

SHAPES = ((30, 11), (3,), (), (50, 9), (1,), (129,))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_stretches_name_every_value_of_a_chunk(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 256)
    parameters = [torch.rand(shape) for shape in SHAPES]
    flags = [at % 2 == 0 for at in range(len(SHAPES))]
    layout = Layout.of([f"p{at}" for at in range(len(SHAPES))], parameters, flags)
    flats = [torch.zeros(flat.size, dtype=flat.dtype) for flat in layout.flats]
    torch._foreach_copy_(layout.views(flats), parameters)
    partition = Partition(layout, shards)
    values = 0
    for shard in range(shards):
        ranges = partition.cut(shard, flats)
        cutting = Cutting.of(partition, shard)
        for chunk, stretches in zip(cutting.chunks, cutting.stretches, strict=True):
            parts = [
                torch.zeros(size) if at == GAP else parameters[at].reshape(-1)[start : start + size]
                for at, start, size in stretches
            ]
            expected = ranges[chunk.range][chunk.start : chunk.stop]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=0)
            values += sum(size for at, _, size in stretches if at != GAP)
    assert values == sum(p.numel() for p in parameters)
