"""A member without samples makes passes with pads that do not count."""

from __future__ import annotations

import torch

from echelon.comm.collectives import Solo
from echelon.core.types import Batch, Sparse
from echelon.strategy.batch_norm import Pad, Padding, _described, _made


def test_a_member_without_samples_goes_along_with_one_that_is_known() -> None:
    sparse = Sparse(torch.tensor([4, 2, 7]), torch.ones(3), torch.tensor([0, 2, 3]), 9)
    batch: Batch = {"x": sparse, "y": torch.arange(40, dtype=torch.int16).view(2, 4, 5)}
    padding = Padding(Solo(), torch.device("cpu"))
    assert padding.most(3) == 3
    assert padding.pads([batch], 1) == []
    pad, again = padding.pads([batch], 3)
    assert pad is again
    assert isinstance(pad, Pad)
    column, label = pad["x"], pad["y"]
    assert isinstance(column, Sparse)
    assert isinstance(label, torch.Tensor)
    assert (column.indices.tolist(), column.offsets.tolist()) == ([4, 2, 4, 2], [0, 2, 4])
    assert torch.equal(label, torch.arange(20).view(1, 4, 5).expand(2, 4, 5))
    (known,) = padding.pads([], 1)
    assert torch.equal(known["y"], label)  # type: ignore[arg-type]
    made = _made(_described(pad), torch.device("cpu"))
    assert isinstance(made["x"], Sparse)
    assert isinstance(made["y"], torch.Tensor)
    assert (made["x"].width, made["x"].values.dtype) == (9, torch.float32)
    assert len(made["x"].indices) == 4
    assert (made["y"].shape, made["y"].dtype) == (torch.Size([2, 4, 5]), torch.int16)
