"""Gradients of the same rows from several places, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowGradients(NamedTuple):
    """Distinct ids, the sum of the gradients of each, and how often each one occurred."""

    ids: Tensor
    sums: Tensor
    counts: Tensor


def merged(parts: Sequence[RowGradients]) -> RowGradients:
    """One for all of them. Their order does not matter but for rounding."""
    if len(parts) == 1:
        return parts[0]
    ids, where = np.unique(torch.cat([part.ids for part in parts]).numpy(), return_inverse=True)
    at = torch.from_numpy(where)
    values = torch.cat([part.sums for part in parts])
    sums = values.new_zeros(len(ids), values.shape[1]).index_add_(0, at, values)
    counts = torch.cat([part.counts for part in parts])
    total = counts.new_zeros(len(ids)).index_add_(0, at, counts)
    return RowGradients(torch.from_numpy(ids), sums, total)
