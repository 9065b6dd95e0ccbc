"""Who holds which parameter, and how those who hold the same one stay alike.

A parameter lives where its stage is: at one place of the pipeline, in every replica along the data
axis. A tied one (a table that both the first and the last stage use) lives at several places. Its
gradient is the sum over all of them, and each makes the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError, unknown

Places = tuple[int, ...]


def find_holders(model: nn.Module, stages: Iterable[tuple[int, nn.Module]]) -> dict[Tensor, Places]:
    """The places of every parameter and buffer; `stages` gives (place, layer) pairs."""
    found: dict[Tensor, set[int]] = {}
    for place, layer in stages:
        for tensor in chain(layer.parameters(), layer.buffers()):
            found.setdefault(tensor, set()).add(place)
    assert set(found) == set(chain(model.parameters(), model.buffers())), "a layer is in no stage"
    return {tensor: tuple(sorted(places)) for tensor, places in found.items()}


@torch.no_grad()
def make_meta(model: nn.Module, elsewhere: Iterable[Tensor]) -> None:
    """Let go of what others hold: shape and dtype stay, memory goes."""
    empty = {tensor: tensor.to("meta") for tensor in elsewhere}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in empty:
                frozen = not parameter.requires_grad
                held = empty[parameter]
                if not isinstance(held, nn.Parameter):
                    held = empty[parameter] = nn.Parameter(held, requires_grad=not frozen)
                module._parameters[name] = held
        for name, buffer in module._buffers.items():
            if buffer in empty:
                module._buffers[name] = empty[buffer]


def make_alike(
    named: Mapping[str, Tensor],
    shared: Mapping[Places, Collective],
    holders: Mapping[Tensor, Places],
    skip: Sequence[str],
) -> None:
    """Copy what several members hold from the first of them, but for what `skip` names."""
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                unknown("sync.skip_init: parameter", pattern, named), ("sync", "skip_init")
            )
    for places, collective in shared.items():
        chosen = [
            tensor.detach()
            for name, tensor in named.items()
            if holders.get(tensor) == places
            and tensor.numel()
            and not any(fnmatchcase(name, pattern) for pattern in skip)
        ]
        collective.broadcast_(chosen)


class SharedGradients:
    """Gradients that several members have, summed in one row of memory.

    Behind them, in the same row, each member says which ones it has at all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], collective: Collective) -> None:
        self._parameters, self._collective = parameters, collective
        size = sum(p.numel() for p in parameters)
        first = parameters[0]
        self._row = torch.zeros(size + len(parameters), dtype=first.dtype, device=first.device)
        self._present = self._row[size:]
        self._views: list[Tensor] = []
        start = 0
        for p in parameters:
            self._views.append(self._row.as_strided(p.shape, p.stride(), start))
            start += p.numel()

    def sum(self) -> None:
        """Leave the sum in every parameter's `grad`."""
        grads = [p.grad for p in self._parameters]
        self._row.zero_()
        pairs = [(v, g) for v, g in zip(self._views, grads, strict=True) if g is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        self._present.copy_(torch.tensor([float(grad is not None) for grad in grads]))
        self._collective.sum_(self._row)
        for p, view, count in zip(
            self._parameters, self._views, self._present.tolist(), strict=True
        ):
            p.grad = view if count else None


def by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())
