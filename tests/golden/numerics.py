"""Tell whether this machine rounds as the machine that recorded the golden files.

Kernels differ between processors, so equal code gives equal bits only on equal arithmetic.
`arithmetic()` trains a network without Echelon and hashes the result. Where the hash is the
recorded one, golden results must be bit-identical; elsewhere they must agree within rounding.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn


def digest(parts: Iterable[bytes]) -> str:
    """Hash byte strings in order; their boundaries count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().numpy().tobytes()


@functools.cache
def arithmetic() -> str:
    """Hash what this processor computes in the kinds of kernels that the golden runs use."""
    torch.set_num_threads(1)  # sums on several threads round otherwise
    draw = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        x, y = torch.randn(12, 24, generator=draw), torch.randint(5, (12,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    matrix = np.random.default_rng(3).normal(size=(200, 40))
    singular = np.linalg.svd(matrix.T @ matrix)[1]
    sums = np.exp(matrix).sum(axis=0)
    return digest(
        [*map(tensor_bytes, model.state_dict().values()), singular.tobytes(), sums.tobytes()]
    )
