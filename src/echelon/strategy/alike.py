"""All members begin with member 0's weights."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from echelon.core.errors import ConfigError, unknown


class Copying(Protocol):
    """The part of a collective that is needed here."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...


@torch.no_grad()
def make_alike(model: nn.Module, collective: Copying, skip: Sequence[str]) -> None:
    """Copy parameters and buffers from the first member, but for those that `skip` names."""
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                unknown("sync.skip_init: parameter", pattern, named), ("sync", "skip_init")
            )
    chosen = [
        tensor.detach()
        for name, tensor in named.items()
        if tensor.numel() and not any(fnmatchcase(name, pattern) for pattern in skip)
    ]
    collective.broadcast_(chosen)
