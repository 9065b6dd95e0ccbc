"""Which members hold a parameter, and how members that hold the same one stay equal.

A parameter is where its stage is: at one place of the pipeline, in every replica along the data
axis. A tied one (a table that both the first and the last stage use) is at several places. Its
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
from echelon.optim import gradients

Places = tuple[int, ...]


def find_holders(model: nn.Module, stages: Iterable[tuple[int, nn.Module]]) -> dict[Tensor, Places]:
    """Return the places of every parameter and buffer; `stages` are (place, layer) pairs."""
    found: dict[Tensor, set[int]] = {}
    for place, layer in stages:
        for tensor in chain(layer.parameters(), layer.buffers()):
            found.setdefault(tensor, set()).add(place)
    assert set(found) == set(chain(model.parameters(), model.buffers())), "a layer is in no stage"
    return {tensor: tuple(sorted(places)) for tensor, places in found.items()}


@torch.no_grad()
def make_meta(model: nn.Module, elsewhere: Iterable[Tensor]) -> None:
    """Move tensors of other members to the meta device: keep shape and dtype, free the memory."""
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
    """Copy tensors that several members hold from the first one, except those that match `skip`."""
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

    Behind the gradients, the same row has a flag for each one that this member has at all.
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
        """Put the sum over all members into every parameter's `grad`."""
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


def all_norms(
    world: Collective, names: Sequence[str], mine: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the norms of all members' weights and gradients, each as a tensor of one number.

    `mine` are the parameters that this member counts; those without a gradient are left out.
    """
    held = [(name, p.detach(), p.grad) for name, p in mine.items() if p.grad is not None]
    sizes = gradients.layer_norms((name, weight) for name, weight, _ in held)
    slopes = gradients.layer_norms((name, grad) for name, _, grad in held)
    norms = torch.zeros(len(names), 3, dtype=torch.float64)
    for at, name in enumerate(names):
        if name in sizes:
            norms[at] = torch.tensor([1.0, sizes[name], slopes[name]])
    world.sum_(norms)
    found = [(name, row) for name, row in zip(names, norms, strict=True) if row[0]]
    return {name: row[1] for name, row in found}, {name: row[2] for name, row in found}
