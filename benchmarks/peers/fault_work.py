"""What is trained while members are killed, and how fast a step is: small, so that what a failure
costs is not hidden behind a step that was under way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import models
from .stamps import StampedAdamW
from .work import LR, SEED

MEMBERS = 3
BATCH = 96
SAMPLES = 3072
SAVE_EVERY = 25
"""Steps between two checkpoints."""


def model() -> nn.Module:
    torch.manual_seed(SEED)
    return models.cnn()


def data() -> tuple[Tensor, Tensor]:
    """Images of ten classes."""
    draw = torch.Generator().manual_seed(SEED)
    y = torch.randint(10, (SAMPLES,), generator=draw)
    pattern = torch.randn(10, 1, 28, 28, generator=draw)
    return pattern[y] + torch.randn(SAMPLES, 1, 28, 28, generator=draw), y


def optimizer(parameters: Iterable[nn.Parameter], stamps: Path) -> torch.optim.Optimizer:
    return StampedAdamW(parameters, stamps, LR)


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)
