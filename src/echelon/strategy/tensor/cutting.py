"""Take from a whole model what belongs to one member of a team."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from echelon.core.errors import ConfigError
from echelon.models.gpt import Attention
from echelon.strategy.tensor.cuts import Cut, by_heads, even
from echelon.strategy.tensor.layers import Team, cut_columns, cut_rows
from echelon.strategy.tensor.plan import Plan


def cut_model(model: nn.Module, plan: Plan, team: Team) -> list[Cut]:
    """Cut the planned layers in place; returns what was cut."""
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
