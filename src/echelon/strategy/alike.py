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
    names: dict[Tensor, list[str]] = {}  # a tied one has several
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(tensor, []).append(name)
    known = list(chain.from_iterable(names.values()))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                unknown("sync.skip_init: parameter", pattern, known), ("sync", "skip_init")
            )
    chosen = [
        tensor.detach()
        for tensor, its in names.items()
        if tensor.numel() and not left_alone(its, skip)
    ]
    collective.broadcast_(chosen)


def left_alone(names: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Which of these names `skip` names, be it by a pattern."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in skip)]
