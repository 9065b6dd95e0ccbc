"""torch's `fully_shard` over a model: its repeated parts one by one, then the rest of it.

A part's parameters are complete only while it computes. Gradients are summed, not averaged, because
their divisor (the weight of all samples) is known later. On a CPU the members' own collective takes
the place of torch's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.core.interfaces import Task
from echelon.core.types import Batch
from echelon.data.batch import to_device
from echelon.data.loader import PositionDraws
from echelon.strategy.model import blocks
from echelon.strategy.optimizer_shards import Piece

UNIT = 8 << 20
"""Bytes; a larger layer is gathered by itself, a smaller one together with its parent."""


def shard(
    model: nn.Module, parts: Sequence[nn.Module], mesh: DeviceMesh, group: Collective | None
) -> None:
    """Distribute the model over the mesh: divided along its last axis, replicated along any other.

    Each of `parts` is gathered at once, inner parts first; the rest of the model is another part.
    `group`, if given, replaces torch's collective along the last axis.
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
    """Refuse parameters that torch cannot divide: it would only fail in the middle of a step."""
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


def _shard_one(part: nn.Module, mesh: DeviceMesh) -> None:
    part.register_forward_hook(_not_a_view)
    sharded: FSDPModule = fully_shard(part, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_reduce_scatter_unused_params(True)


def _not_a_view(_part: nn.Module, _args: Any, output: Any) -> Any:
    """Clone views in a part's output.

    A view that is changed in place would lose torch's hook, which gathers weights for backward.
    """
    return tree_map_only(Tensor, lambda x: x.clone() if x._is_view() else x, output)


def _exchange_by(group: Collective, number: int, name: str, part: nn.Module) -> None:
    sharded = cast(FSDPModule, part)
    sharded.set_custom_all_gather(cast(Any, AllGather(group, number, name)))
    sharded.set_custom_reduce_scatter(cast(Any, ReduceScatter(group, number, name)))
    # Prefetch only the part itself, which is gathered already: nothing would be won by more.
    sharded.set_modules_to_backward_prefetch([sharded])


def units(model: nn.Module) -> list[nn.Module]:
    """Return the parts that may be gathered at once, inner parts first: repeated parts and large
    layers.

    A parameter that is also used elsewhere stays with the model, which is complete all the time.
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
    """Return all parameters, a tied one as often as it is used."""
    return module.named_parameters(remove_duplicate=False)


def _is_apart(unit: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    inside = Counter(parameter for _, parameter in _all_parameters(unit))
    return all(uses[parameter] == times for parameter, times in inside.items())


def _is_callable(unit: nn.Module) -> bool:
    """Return whether a unit has a forward method, before which its weights can be gathered."""
    return not isinstance(unit, nn.ModuleList | nn.ModuleDict)


def pieces(named: Sequence[tuple[str, nn.Parameter]], group: Collective) -> list[Piece]:
    """Return this member's rows of each parameter."""
    return [_piece(name, parameter, group) for name, parameter in named]


def _piece(name: str, parameter: nn.Parameter, group: Collective) -> Piece:
    rows, row = parameter.shape[0] if parameter.ndim else 1, math.prod(parameter.shape[1:])
    each = -(-rows // group.count)
    edges = [min(each * at, rows) * row for at in range(group.count + 1)]
    ranges = tuple(pairwise(edges))
    here = local(parameter)
    start, stop = ranges[group.index]
    assert here.numel() == stop - start, f"{name!r}: {here.numel()} values in {start}:{stop}"
    return Piece(name, parameter.shape, parameter.stride(), ranges, here)


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, which may be a DTensor."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def watch(model: nn.Module, seen: Callable[[str], None]) -> None:
    """Call `seen` with a parameter's name whenever backward computes a gradient for it.

    torch creates the complete parameters at a part's first forward pass and keeps them.
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


# Exchange: the members' own collective in place of torch's
#
# On a CPU, `fully_shard` gathers and sums with it. Between processes of one host it is memory that
# they share, several times as fast as gloo.


class Exchange:
    """What torch requires of both collectives. `number` identifies the layer."""

    def __init__(self, group: Collective, number: int, name: str) -> None:
        self._group, self._number, self._name = group, number, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _meet(self, number: int) -> None:
        """Check that all members are in the same layer: equal shapes would be mixed silently.

        Only if all have the same number n are Σ n = count · n and Σ n² = count · n².
        """
        count = self._group.count
        if self._group.sum([number, number * number]) != [count * number, count * number * number]:
            raise TaskError(
                f"members went through different layers ({self._name!r} in this one): under "
                f"sharded.level parameters all have to use the same ones; take level gradients"
            )


class AllGather(Exchange):
    """Gather every member's part into the output of all members."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        self._meet(2 * self._number + 1)
        parts = output_tensor.chunk(self._group.count)
        assert parts[self._group.index].data_ptr() == input_tensor.data_ptr(), "gathered in place"
        for source, part in enumerate(parts):
            self._group.broadcast_([part], source)


class ReduceScatter(Exchange):
    """Sum over all members and keep this member's part. torch is set to ask for sums only."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        self._meet(2 * self._number + 2)
        self._group.sum_(input_tensor)
        output_tensor.copy_(input_tensor.chunk(self._group.count)[self._group.index])
        # torch keeps the input, unread, until the next layer's gradients are there: free it now.
        input_tensor.untyped_storage().resize_(0)


# Layers whose weights are used outside of them
#
# A layer that is gathered by itself has complete weights only while it is called. Some weights are
# read from elsewhere: a table of positions that is added, an output layer that attention multiplies
# with itself.


_SAMPLES = 2


def first_samples(task: Task, device: torch.device) -> Batch | None:
    """Return a few samples as the model gets them, or None if the task has no training samples."""
    if task.train is None:
        return None
    rows = torch.arange(min(_SAMPLES, len(task.train)))
    batch: Batch = to_device(task.train.gather(rows), device)
    if task.augment is None:
        return batch
    return task.augment(batch, PositionDraws(0, 0, rows.numpy(), device))


def used_outside(
    model: nn.Module, parts: Sequence[nn.Module], go: Callable[[], Any]
) -> set[nn.Module]:
    """Return those of `parts` that have a weight which is used while they are not being called."""
    training, watch = model.training, _Watch(parts)
    model.eval()  # keeps running statistics, and takes fast paths that read more weights directly
    try:
        with torch.random.fork_rng(), torch.no_grad(), watch.called(), watch:
            go()
    finally:
        model.train(training)
    return watch.found


class _Watch(TorchFunctionMode):
    """Looks for parameters among the arguments of torch's functions."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.found: set[nn.Module] = set()
        self._parts = parts
        self._active: Counter[nn.Module] = Counter()
        self._holders: dict[Tensor, list[nn.Module]] = {}
        for part in parts:
            for parameter in part.parameters():
                self._holders.setdefault(parameter, []).append(part)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Keep track of which parts are being called."""
        handles = [part.register_forward_pre_hook(self._enter) for part in self._parts]
        handles += [part.register_forward_hook(self._leave) for part in self._parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, part: nn.Module, _args: Any) -> None:
        self._active[part] += 1

    def _leave(self, part: nn.Module, _args: Any, _output: Any) -> None:
        self._active[part] -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading a shape or a dtype is no use
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    idle = [part for part in self._holders.get(leaf, ()) if not self._active[part]]
                    self.found.update(idle)
        return func(*args, **kwargs)
