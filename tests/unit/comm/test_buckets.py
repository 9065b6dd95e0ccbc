"""Sums in half precision are the same after an evaluation as before."""

from __future__ import annotations

import torch

from echelon.comm.buckets import Divider


def test_halves_are_summed_after_an_evaluation_as_before() -> None:
    divider = Divider(torch.device("cpu"))
    with torch.inference_mode():
        seen = torch.ones(8, dtype=torch.bfloat16)
        divider.sum_(seen, (seen, torch.ones(8, dtype=torch.bfloat16)))
    parts = [torch.full((8,), value, dtype=torch.bfloat16) for value in (1.0, 2.0)]
    total = torch.zeros(8, dtype=torch.bfloat16)
    divider.sum_(total, parts)
    assert total.tolist() == [3.0] * 8
