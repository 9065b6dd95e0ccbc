"""torch's `fully_shard` over a model: its repeated parts one by one, then the rest of it.

A part's parameters are whole only while it computes. Their gradients are summed, not averaged:
what they are divided by is known later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.strategy.replica import blocks
from echelon.strategy.sharded.exchange import AllGather, ReduceScatter
from echelon.strategy.sharded.pieces import Piece

UNIT = 8 << 20
"""Bytes; a larger layer is gathered by itself, a smaller one with what is around it."""


def shard(
    model: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh, group: Collective | None
) -> None:
    """Lay the model out over the mesh: along its last axis divided, along any other repeated.

    `parts`: what is gathered at once, inner parts first; the rest of the model is another one.
    `group`: what to gather and sum with along the last axis, in place of torch's own.
    """
    parts = [*parts, model]
    _check_divisible(model, parts)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    names = {module: name for name, module in model.named_modules()}
    for number, part in enumerate(parts):
        _shard_one(part, mesh)
        if group is not None:
            _exchange_by(group, number, names[part], part)


def _check_divisible(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Refuse what torch cannot divide, and would say so of in the middle of a step."""
    other = "or take sharded.level gradients"
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise TaskError(
                f"parameter {name!r} is a single number, which torch cannot divide: give it the "
                f"shape [1], {other}"
            )
        if parameter.numel() == 0:
            raise TaskError(f"parameter {name!r} is empty: leave it out, {other}")
    names, inside = {p: name for name, p in model.named_parameters()}, set[nn.Parameter]()
    for part in parts:
        own = [p for p in part.parameters() if p not in inside]
        trained = [p for p in own if p.requires_grad]
        if odd := [p for p in trained if p.dtype != trained[0].dtype]:
            raise TaskError(
                f"parameters {names[trained[0]]!r} and {names[odd[0]]!r} are of different kinds "
                f"({trained[0].dtype}, {odd[0].dtype}) in one part of the model, which torch "
                f"cannot divide: make them alike, {other}"
            )
        inside.update(own)


def units(model: nn.Module) -> list[nn.Module]:
    """What may be gathered at once, inner parts first: repeated parts, and large layers.

    A parameter that is also used elsewhere has to be whole all the time, as part of the model.
    """
    uses = Counter(parameter for _, parameter in _all_parameters(model))
    chosen = _parts(model, {block for block in blocks(model) if block is not model})
    return [unit for unit in chosen if _is_callable(unit) and _is_apart(unit, uses)]


def _parts(module: nn.Module, repeated: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _parts(child, repeated)
        size = sum(parameter.nbytes for parameter in child.parameters())
        if child in repeated or size >= UNIT:
            yield child


def _all_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """A tied one as often as it is used."""
    return module.named_parameters(remove_duplicate=False)


def _is_apart(unit: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    inside = Counter(parameter for _, parameter in _all_parameters(unit))
    return all(uses[parameter] == times for parameter, times in inside.items())


def _is_callable(unit: nn.Module) -> bool:
    """Lists of modules have no forward to gather before."""
    return not isinstance(unit, nn.ModuleList | nn.ModuleDict)


def pieces(named: Sequence[tuple[str, nn.Parameter]], group: Collective) -> list[Piece]:
    """The rows of each parameter that lie here."""
    return [_piece(name, parameter, group) for name, parameter in named]


def local(tensor: Tensor) -> Tensor:
    """The part of it that lies here."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def watch(model: nn.Module, seen: Callable[[str], None]) -> None:
    """Have `seen` called with a parameter's name whenever backward found a gradient for it.

    The whole parameters are made at a part's first forward, and are the same ones ever after.
    """
    known: set[nn.Parameter] = set()

    def look(prefix: str, module: nn.Module, _args: Any) -> None:
        for name, parameter in module.named_parameters(prefix):
            if not isinstance(parameter, DTensor) and parameter not in known:
                known.add(parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen(name))

    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            cast(nn.Module, module).register_forward_pre_hook(partial(look, prefix))


def _shard_one(part: nn.Module, mesh: DeviceMesh) -> None:
    part.register_forward_hook(_not_a_view)
    sharded: FSDPModule = fully_shard(part, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_reduce_scatter_unused_params(True)


def _exchange_by(group: Collective, number: int, name: str, part: nn.Module) -> None:
    sharded = cast(FSDPModule, part)
    sharded.set_custom_all_gather(cast(Any, AllGather(group, number, name)))
    sharded.set_custom_reduce_scatter(cast(Any, ReduceScatter(group, number, name)))
    # Nothing is gathered ahead (but what is there already): nothing would be won by it.
    sharded.set_modules_to_backward_prefetch([sharded])


def _not_a_view(_part: nn.Module, _args: Any, output: Any) -> Any:
    """A view that is changed in place would lose torch's hook, and its weights for backward."""
    return tree_map_only(Tensor, lambda x: x.clone() if x._is_view() else x, output)


def _piece(name: str, parameter: nn.Parameter, group: Collective) -> Piece:
    rows, row = parameter.shape[0] if parameter.ndim else 1, math.prod(parameter.shape[1:])
    each = -(-rows // group.count)
    edges = [min(each * at, rows) * row for at in range(group.count + 1)]
    ranges = tuple(pairwise(edges))
    here = local(parameter)
    start, stop = ranges[group.index]
    assert here.numel() == stop - start, f"{name!r}: {here.numel()} values in {start}:{stop}"
    return Piece(name, parameter.shape, parameter.stride(), ranges, here)
