"""A batch in micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.strategy.pipeline.schedule import how_many, pieces


@given(st.integers(1, 300), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_pieces_are_alike_and_make_up_the_batch(
    size: int, members: int, wanted: int | None
) -> None:
    count = how_many(size, members, wanted)
    found = [piece["x"] for piece in pieces({"x": torch.arange(size)}, count)]
    assert torch.cat(found).tolist() == list(range(size))  # type: ignore[arg-type]
    lengths = [len(piece) for piece in found]
    assert max(lengths) - min(lengths) <= 1
    assert len(found) == count <= (wanted or 4 * members)
    assert min(lengths) >= (2 if wanted is None and size > 1 else 1)
