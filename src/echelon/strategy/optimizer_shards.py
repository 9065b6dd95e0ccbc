"""An optimizer over parts of parameters, saved as if it were over complete parameters.

Members that divide parameters among them step only their parts, which is possible for optimizers
that treat every value by itself. `divide` puts the parts into an optimizer, `whole_state` puts its
state together for a checkpoint, and `own_state` cuts this member's parts out of a checkpoint. So
checkpoints do not depend on the number of members.

How a parameter is divided is up to the strategy: `Piece` is a range of its values (sharded),
`Cut` of `tensor/layers.py` a set of rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError, TaskError
from echelon.core.types import Parallel

# Their step treats every value by itself, so a part of a parameter is stepped like all of it.
# Exact types, because a subclass may do anything.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adadelta,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Rprop,
        optim.ASGD,
    }
)
_SINGLE = ("step", "mu_product", "eta", "mu")
"""State that these optimizers keep once per parameter, not for every value."""


def check_divisible(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would step a part of a parameter otherwise than all of it."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise TaskError(
            f"optimizer {type(optimizer).__name__} cannot be divided among members: it is not "
            f"known to treat every value by itself; use strategy all_reduce, or one of {known}"
        )


def divide(optimizer: Optimizer, parameters: Mapping[Tensor, Piece], index: int) -> None:
    """Replace the optimizer's parameters by this member's parts.

    It keeps parameters that are not divided, such as frozen ones of a user's optimizer.
    """
    check_divisible(optimizer)
    kept = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            piece, state = parameters.get(parameter), kept.pop(parameter, None)
            if piece is None:
                optimizer.state |= {parameter: state} if state else {}
            elif state:
                optimizer.state[piece.local] = _kept(piece, state, index)
        group["params"] = [
            parameters[parameter].local if parameter in parameters else parameter
            for parameter in group["params"]
        ]


def _kept(piece: Piece, state: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return this member's part of the state that an optimizer has before its first step, copied.

    The state of a parameter that torch has sharded (a DTensor) is sharded already.
    """
    kept = dict(state)
    for key, value in state.items():
        if _is_divided(key, value):
            sharded = getattr(value, "to_local", None)
            part = piece.cut(value, index, what=key) if sharded is None else sharded()
            kept[key] = part.clone()
    return kept


def whole_state(
    local: dict[str, Any], pieces: Sequence[Kind], group: Collective, gather: Gather[Kind]
) -> dict[str, Any]:
    """Return the named state of complete parameters. Only the group's first member gets it all.

    All members have stepped the same parameters, so they have the same keys; a member whose part of
    a parameter is empty keeps empty state for it.
    """
    state: dict[str, dict[str, Any]] = {name: dict(held) for name, held in local["state"].items()}
    known = {piece.name: piece for piece in pieces}
    divided = [
        (name, key)
        for name, held in state.items()
        if name in known
        for key, value in held.items()
        if _is_divided(key, value)
    ]
    parts = [state[name][key] for name, key in divided]
    wholes = gather([known[name] for name, _ in divided], parts, group)
    for (name, key), whole in zip(divided, wholes, strict=True):
        if group.index == 0:
            state[name][key] = whole
        else:
            del state[name][key]
    return {"state": state, "groups": local["groups"]}


def own_state(saved: dict[str, Any], pieces: Sequence[Divided], index: int) -> dict[str, Any]:
    """Cut this member's parts out of the named state of complete parameters.

    State of an unknown form is returned as it is: loading it raises the error.
    """
    known = {piece.name: piece for piece in pieces}
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return saved
    state = {
        name: _cut(known[name], held, index) if name in known else held
        for name, held in saved["state"].items()
    }
    return {**saved, "state": state}


def _cut(piece: Divided, state: Mapping[str, Any], index: int) -> dict[str, Any]:
    what = f"optimizer state of {piece.name!r}: "
    return {
        key: piece.cut(value, index, what=what + key) if _is_divided(key, value) else value
        for key, value in state.items()
    }


def _is_divided(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in _SINGLE


class Divided(Protocol):
    """A parameter that is divided among members."""

    @property
    def name(self) -> str: ...

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """Return the part of `whole` that belongs to member `index`."""
        ...


Kind = TypeVar("Kind", bound=Divided)
Gather = Callable[[Sequence[Kind], Sequence[Tensor], Collective], Iterator[Tensor]]
"""Yields complete tensors, given the parts of this member."""


# Parts of parameters that are ranges of their values
#
# A parameter's values, in the order in which they lie in memory, are cut into ranges, one for each
# member of a sharded group; some may be empty. An optimizer's state for it is cut in the same way.


GATHERED = 32 << 20
"""Bytes that are gathered at once: members that do not keep the result need no more memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This member's part of a parameter, and where the other members' parts belong."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    """The range of each member of the group."""
    local: Tensor
    """The part itself, which the optimizer steps."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def empty(self, like: Tensor) -> Tensor:
        """Allocate memory for the complete parameter."""
        return torch.empty_strided(self.shape, self.stride, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """Return the part of `whole` that belongs to member `index`, in the shape of `local`."""
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{what} is {tuple(whole.shape)}, but the parameter is {tuple(self.shape)}"
            )
        if whole.stride() != self.stride:
            whole = self.empty(whole).copy_(whole)
        start, stop = self.ranges[index]
        return in_row(whole)[start:stop].view(self.local.shape)


def in_row(tensor: Tensor) -> Tensor:
    """View a tensor's values in the order in which they lie in memory; a parameter has no gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def gathered(
    pieces: Sequence[Piece], parts: Sequence[Tensor], group: Collective
) -> Iterator[Tensor]:
    """Yield the complete tensor of each part. All members of the group call this together."""
    for chosen in _loads(pieces, parts):
        wholes = [pieces[at].empty(parts[at]) for at in chosen]
        rows = [in_row(whole) for whole in wholes]
        for at, row in zip(chosen, rows, strict=True):
            start, stop = pieces[at].ranges[group.index]
            row[start:stop].copy_(parts[at].reshape(-1))
        for source in range(group.count):
            ranges = [pieces[at].ranges[source] for at in chosen]
            group.broadcast_(
                [row[a:b] for row, (a, b) in zip(rows, ranges, strict=True) if a < b], source
            )
        yield from wholes


def _loads(pieces: Sequence[Piece], parts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of the parts to gather at once."""
    chosen: list[int] = []
    used = 0
    for at, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        size = piece.numel * part.itemsize
        if chosen and used + size > GATHERED:
            yield chosen
            chosen, used = [], 0
        chosen.append(at)
        used += size
    if chosen:
        yield chosen


# Members along the axes of the mesh


def lengths(parallel: Parallel, axis: str, count: int) -> tuple[int, int]:
    """Return the number of members along `data` and `axis`; all along `axis` without a mesh."""
    data = parallel.mesh.get("data", 1)
    along = parallel.mesh.get(axis, count // data)
    assert data * along == count, f"a mesh of {data} × {along} for {count} members"
    return data, along


def sharded_group(
    comm: Group, everybody: Collective, parallel: Parallel, device: torch.device
) -> Collective:
    """Return the group of members that hold one model between them, with this member."""
    data, along = lengths(parallel, "sharded", comm.count)
    if data == 1:
        return everybody
    first = comm.index // along * along
    return comm.collective(range(first, first + along), device=device)
