"""Linear layers in parts: cut them out of a model, compute with them, put them together again.

`cut_model` replaces the weights of the planned layers by this member's part and patches their
forward methods; `gathered` returns complete tensors from the parts of all members of the team.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError, ConfigError
from echelon.models.gpt import Attention
from echelon.strategy.tensor.plan import Plan

# Cutting a model: this member's part of every planned layer


def cut_model(model: nn.Module, plan: Plan, team: Team) -> list[Cut]:
    """Cut the planned layers in place; return the cut parameters."""
    count = team.group.count
    _refuse_tied(model, plan)
    cuts: list[Cut] = []
    before = "rows"
    for name, how in plan.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        size = layer.out_features if how == "columns" else layer.in_features
        if size < count:
            raise ConfigError(
                f"layer {name!r} cannot be cut by {how} into {count} parts: it has {size}",
                ("tensor", "plan"),
            )
        places = _places(model, name, size, count)
        cuts.append(_cut(layer, f"{name}.weight", 0 if how == "columns" else 1, places, team))
        if how == "columns" and layer.bias is not None:
            cuts.append(_cut(layer, f"{name}.bias", 0, places, team))
        if how == "columns":
            cut_columns(layer, team, first=before == "rows")
        else:
            cut_rows(layer, team)
        before = how
    return cuts


def _places(model: nn.Module, name: str, size: int, count: int) -> tuple[Tensor, ...]:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if not isinstance(owner, Attention):
        return even(size, count)
    if owner.heads % count:
        raise ConfigError(
            f"model.heads = {owner.heads}: must be a multiple of the {count} members that share "
            f"a layer",
            ("model", "heads"),
        )
    parts = 3 if child == "qkv" else 1
    return by_heads(size // parts, owner.heads, parts, count)


def even(size: int, count: int) -> tuple[Tensor, ...]:
    """Divide `size` rows into `count` ranges whose lengths differ by at most one."""
    edges = [size * at // count for at in range(count + 1)]
    return tuple(torch.arange(*edges[at : at + 2]) for at in range(count))


def by_heads(width: int, heads: int, parts: int, count: int) -> tuple[Tensor, ...]:
    """Divide the rows of `parts` stacked matrices by attention heads: a head's rows of all matrices
    belong to the same member."""
    rows = torch.arange(parts * width).view(parts, heads, width // heads)
    return tuple(rows[:, chosen].flatten() for chosen in even(heads, count))


@torch.no_grad()
def _cut(layer: nn.Linear, name: str, dim: int, places: tuple[Tensor, ...], team: Team) -> Cut:
    kind = name.rpartition(".")[2]
    whole: nn.Parameter = getattr(layer, kind)
    cut = Cut(name, whole.shape, dim, places)
    part = cut.cut(whole, team.group.index, what=name)
    setattr(layer, kind, nn.Parameter(part, requires_grad=whole.requires_grad))
    return cut


def _refuse_tied(model: nn.Module, plan: Plan) -> None:
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in plan:
        if any(uses[p] > 1 for p in model.get_submodule(name).parameters()):
            raise ConfigError(
                f"tensor.plan: layer {name!r} shares a parameter with another: it cannot be cut",
                ("tensor", "plan"),
            )


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter, divided along `dim`; `places[i]` are the rows or columns of member i."""

    name: str
    shape: torch.Size
    dim: int
    places: tuple[Tensor, ...]

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """Return the part of `whole` that belongs to member `index`."""
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{what} is {tuple(whole.shape)}, but the parameter is {tuple(self.shape)}"
            )
        return whole.detach().index_select(self.dim, self.places[index].to(whole.device))


def gathered(cuts: Sequence[Cut], parts: Sequence[Tensor], team: Collective) -> Iterator[Tensor]:
    """Yield the complete tensor of each part. All members of the team call this together."""
    for cut, part in zip(cuts, parts, strict=True):
        whole = part.new_empty(cut.shape)
        for source, places in enumerate(cut.places):
            shape = list(cut.shape)
            shape[cut.dim] = len(places)
            piece = part.contiguous() if source == team.index else part.new_empty(shape)
            team.broadcast_([piece], source)
            whole.index_copy_(cut.dim, places.to(whole.device), piece)
        yield whole


# Computing with parts: linear layers after Shoeybi et al. (2019)
#
#     x ──▶ columns ──▶ own outputs ─ elementwise ─▶ rows ──▶ Σ over the team ──▶ y
#     Σ over the team ◀── dx                                              dy ◀── the same for all
#
# Dropout between them draws different numbers in every member, everywhere else the same ones.


@dataclass(frozen=True, slots=True)
class Team:
    """The members that compute a layer together."""

    group: Collective
    chance: Chance


def cut_columns(layer: nn.Linear, team: Team, *, first: bool) -> None:
    """Patch a layer whose weight and bias compute this member's outputs only.

    `first`: no other layer was cut by columns since the last one that was cut by rows.
    """
    # Patched rather than replaced: names and the user's own module do not change.
    layer.forward = functools.partial(_columns, layer, team, first)  # type: ignore[method-assign]


def _columns(layer: nn.Linear, team: Team, first: bool, x: Tensor) -> Tensor:
    alike: Tensor = _SumBackward.apply(x, team.group)  # type: ignore[no-untyped-call]
    y = F.linear(alike, layer.weight, layer.bias)
    if layer.training and first:
        team.chance.part()
    return y


def cut_rows(layer: nn.Linear, team: Team) -> None:
    """Patch a layer whose weight takes this member's inputs only; its bias is complete."""
    layer.forward = functools.partial(_rows, layer, team)  # type: ignore[method-assign]


def _rows(layer: nn.Linear, team: Team, x: Tensor) -> Tensor:
    if layer.training:
        team.chance.join()
    part = F.linear(x, layer.weight)
    y: Tensor = _SumForward.apply(part, team.group)  # type: ignore[no-untyped-call]
    return y if layer.bias is None else y + layer.bias


def restore(model: nn.Module) -> None:
    """Remove the patches. The weights remain parts."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func in (_columns, _rows):
            del module.__dict__["forward"]


class _SumBackward(torch.autograd.Function):
    """The identity, whose gradient is summed over the team: every member used the same x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumForward(torch.autograd.Function):
    """The sum over the team; its gradient is that of every summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:  # noqa: ARG004 (torch's way)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _summed(x: Tensor, group: Collective) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.sum_(total)
    return total


# The random numbers of a team


@dataclass(slots=True)
class Chance:
    """The random numbers of a team: the same in all members, except between `part` and `join`.

    All members hold the same activations outside of the cut layers, where dropout must agree.
    """

    generator: torch.Generator
    index: int
    _common: Tensor | None = None

    def part(self) -> None:
        """Continue with this member's own numbers.

        They follow from the common state, so a forward pass that is recomputed draws the same ones.
        """
        drawn = torch.randint(1 << 40, (), generator=self.generator, device=self.generator.device)
        self._common = self.generator.get_state()
        self.generator.manual_seed(int(drawn) + 1 + self.index)

    def join(self) -> None:
        """Continue with the common numbers."""
        if self._common is not None:
            self.generator.set_state(self._common)
            self._common = None


def agree_on_chance(team: Collective, device: torch.device) -> Chance:
    """Let all members of the team draw the same numbers from now on."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    state = generator.get_state().to(device)
    team.broadcast_([state])
    generator.set_state(state.cpu())
    return Chance(generator, team.index)
