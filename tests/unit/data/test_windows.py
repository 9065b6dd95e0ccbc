"""Windows over a sequence of tokens, each with the tokens that follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.core.errors import DataError
from echelon.data.sources import WindowSource

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_y_is_x_shifted_by_one(dtype: torch.dtype) -> None:
    source = WindowSource(torch.arange(10).to(dtype), length=4)
    batch = source.gather(torch.tensor([5, 0]))
    assert len(source) == 6
    for name, expected in {
        "x": [[5, 6, 7, 8], [0, 1, 2, 3]],
        "y": [[6, 7, 8, 9], [1, 2, 3, 4]],
    }.items():
        column = batch[name]
        assert isinstance(column, Tensor)
        assert column.tolist() == expected
        assert column.dtype == torch.int64
        assert column.is_contiguous()


@pytest.mark.parametrize("tokens", range(5, 30))
@pytest.mark.parametrize("stride", [1, 3, 4, 7])
def test_every_window_that_fits_is_there(tokens: int, stride: int) -> None:
    source = WindowSource(torch.arange(tokens), length=4, stride=stride)
    starts = [start for start in range(0, tokens, stride) if start + 5 <= tokens]
    batch = source.gather(torch.arange(len(source)))
    assert batch["x"][:, 0].tolist() == starts  # type: ignore[call-overload, union-attr]
    assert batch["y"][:, -1].tolist() == [start + 4 for start in starts]  # type: ignore[call-overload, union-attr]


def test_a_gather_does_not_show_the_sequence_itself() -> None:
    tokens = torch.arange(10)
    batch = WindowSource(tokens, length=4).gather(torch.tensor([0]))
    batch["x"].zero_()  # type: ignore[union-attr]
    assert tokens.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "complaint"),
    [
        (torch.arange(4), 4, 1, "4 tokens are too few for one window of 4 and its next token"),
        (torch.zeros(2, 9, dtype=torch.int64), 4, 1, r"not torch.int64 \[2, 9\]"),
        (torch.zeros(9), 4, 1, r"not torch.float32 \[9\]"),
        (torch.arange(9), 0, 1, "windows of 0 tokens every 1"),
        (torch.arange(9), 4, 0, "windows of 4 tokens every 0"),
    ],
)
def test_what_gives_no_window_is_refused(
    tokens: Tensor, length: int, stride: int, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        WindowSource(tokens, length, stride)
