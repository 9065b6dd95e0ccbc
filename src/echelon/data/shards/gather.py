"""Whole batches copied out of the memory of many shards.

A batch's rows are sorted by shard once. Then each column costs one kernel per shard that is
touched, and a record is moved as one opaque item whatever its numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data.shards.file import Array, ShardFile
from echelon.data.shards.schema import Field

_TEMPORARY = 1 << 18
"""Bytes moved at a time where a record is copied twice: they stay in the processor's cache."""


class Piece(NamedTuple):
    """The rows of a batch that lie in one shard."""

    shard: ShardFile
    local: Array
    """Record numbers within the shard."""
    where: Any
    """Their places in the batch: a slice, or numbers."""


def plan(shards: Sequence[ShardFile], starts: Array, rows: Array) -> list[Piece]:
    """Sort rows by shard; `starts` has the first row of each shard."""
    if len(shards) == 1:
        return [Piece(shards[0], rows, slice(None))]
    owner = np.searchsorted(starts, rows, "right") - 1
    local = rows - starts[owner]
    counts = np.bincount(owner, minlength=len(shards))
    touched = np.flatnonzero(counts).tolist()
    cuts = np.cumsum(counts[touched]).tolist()
    spans = list(zip(touched, [0, *cuts], cuts, strict=False))
    if (owner[1:] >= owner[:-1]).all():  # as in a pass without a shuffle
        return [Piece(shards[n], local[low:high], slice(low, high)) for n, low, high in spans]
    order = np.argsort(owner, kind="stable")
    local = local[order]
    return [Piece(shards[n], local[low:high], order[low:high]) for n, low, high in spans]


def gather_dense(field: Field, pieces: Sequence[Piece], count: int) -> Tensor:
    flat = torch.empty((count, field.item_bytes), dtype=torch.uint8)
    out = flat.numpy().reshape(-1).view(field.item)
    step = max(1, _TEMPORARY // field.item_bytes)
    for shard, local, where in pieces:
        items = shard.views[field.name].items
        if isinstance(where, slice):
            # Rows are known to be in range; "clip" spares numpy a buffer to check them in.
            items.take(local, out=out[where], mode="clip")
        elif len(local) <= step:
            out[where] = items[local]
        else:
            for low in range(0, len(local), step):
                out[where[low : low + step]] = items[local[low : low + step]]
    return flat.view(field.torch_dtype).view(count, *field.shape)


def gather_sequence(field: Field, pieces: Sequence[Piece], count: int) -> tuple[Tensor, Tensor]:
    """Sequences padded with 0 to the longest of the batch [count, L], and their lengths."""
    spans = [_spans(field, piece) for piece in pieces]
    lengths = np.empty(count, np.int64)
    for (_, _, where), (_, span) in zip(pieces, spans, strict=True):
        lengths[where] = span
    longest = int(lengths.max(initial=0))
    out = np.zeros((count, longest), field.storage)
    for (shard, _, where), (starts, span) in zip(pieces, spans, strict=True):
        places = np.arange(count)[where]
        values = shard.views[field.name].items
        out.reshape(-1)[ranges(places * longest, span)] = values[ranges(starts, span)]
    return torch.from_numpy(out).view(field.torch_dtype), torch.from_numpy(lengths)


def gather_sparse(field: Field, pieces: Sequence[Piece], count: int) -> Sparse:
    spans = [_spans(field, piece) for piece in pieces]
    offsets = np.zeros(count + 1, np.int64)
    for (_, _, where), (_, span) in zip(pieces, spans, strict=True):
        offsets[1:][where] = span
    np.cumsum(offsets, out=offsets)
    indices = np.empty(offsets[-1], np.int64)
    values = np.empty(offsets[-1], field.storage)
    for (shard, _, where), (starts, span) in zip(pieces, spans, strict=True):
        view = shard.views[field.name]
        assert view.indices is not None
        target, origin = ranges(offsets[:-1][where], span), ranges(starts, span)
        indices[target] = view.indices[origin]
        values[target] = view.items[origin]
    numbers = torch.from_numpy(values).view(field.torch_dtype)
    return Sparse(torch.from_numpy(indices), numbers, torch.from_numpy(offsets), field.width)


def ranges(starts: Array, lengths: Array) -> Array:
    """start, start + 1, … for each (start, length), one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _spans(field: Field, piece: Piece) -> tuple[Array, Array]:
    """Where each record's numbers begin, and how many there are."""
    view = piece.shard.views[field.name]
    assert view.offsets is not None
    starts = view.offsets[piece.local]
    lengths = view.offsets[piece.local + 1] - starts
    wrong = (lengths < 0) | (starts < 0) | (starts + lengths > len(view.items))
    if wrong.any():
        record = piece.shard.first + int(piece.local[wrong.argmax()])
        raise DataError(
            f"{piece.shard.path}: corrupt: offsets of column {field.name!r}, record {record}"
        )
    return starts, lengths
