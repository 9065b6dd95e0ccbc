"""An optimizer's state by parameter name, independent of the order and grouping of parameters.

`{"state": {name: {key: tensor or number}}, "groups": [{option: value, "names": [...]}]}`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from echelon.core.errors import CheckpointError
from echelon.optim.fused import state_keys

Names = Mapping[Tensor, str]
NamedState = dict[str, Any]


# Options that choose a kernel belong to this machine, not to the saved run.
_LOCAL = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")


def named_state(optimizer: Optimizer, names: Names) -> NamedState:
    """Return an optimizer's state. Large tensors are not copied."""
    state = {
        names[p]: {key: _exported(value) for key, value in values.items()}
        for p, values in optimizer.state.items()
    }
    groups = [
        options_of(group) | {"names": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def restore_named_state(optimizer: Optimizer, names: Names, saved: NamedState) -> None:
    """Load a state. Raises CheckpointError, with nothing changed, if it does not fit."""
    saved_state, saved_groups = _parts(saved)
    mine = [names[p] for group in optimizer.param_groups for p in group["params"]]
    theirs = [name for group in saved_groups for name in group["names"]]
    _same_names(mine, theirs)
    _same_names(mine, {*mine, *saved_state})
    options = [_options_for(group, names, saved_groups) for group in optimizer.param_groups]
    restored = {
        p: _restored(optimizer, group | chosen, p, names[p], saved_state.get(names[p], {}))
        for group, chosen in zip(optimizer.param_groups, options, strict=True)
        for p in group["params"]
    }
    for group, chosen in zip(optimizer.param_groups, options, strict=True):
        set_options(group, chosen)
    optimizer.state.clear()
    optimizer.state.update({p: values for p, values in restored.items() if values})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are saved, as plain numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in _LOCAL
    }


def same_options(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return `theirs`. Raises CheckpointError if they are options of another optimizer."""
    if odd := mine.keys() ^ theirs.keys():
        raise CheckpointError(
            f"optimizer state is of another optimizer: they differ in {_some(odd)}"
        )
    return theirs


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        current = group[key]
        if isinstance(current, Tensor):
            current.fill_(value)
        else:  # JSON has no tuples
            group[key] = tuple(value) if isinstance(current, tuple) else value


def _exported(value: Any) -> Any:
    """Return a value to save: a copy if it is a scalar, because step counts share one tensor."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.ndim == 0 else value.detach()
    return value


def _parts(saved: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not isinstance(saved, Mapping) or saved.keys() != {"state", "groups"}:
        raise CheckpointError("optimizer state must have the keys 'state' and 'groups'")
    if not all("names" in group for group in saved["groups"]):
        raise CheckpointError("optimizer state has a group without 'names'")
    return dict(saved["state"]), list(saved["groups"])


def _same_names(mine: Iterable[str], theirs: Iterable[str]) -> None:
    missing, unexpected = set(mine) - set(theirs), set(theirs) - set(mine)
    if missing:
        raise CheckpointError(f"optimizer state lacks {_some(missing)} of this model")
    if unexpected:
        raise CheckpointError(f"optimizer state has {_some(unexpected)}, which is not trained here")


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first!r}" + (f" (and {len(rest)} more)" if rest else "")


def _options_for(
    group: Mapping[str, Any], names: Names, saved_groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the saved options of the group that all of `group`'s parameters were in."""
    members = {names[p] for p in group["params"]}
    for saved in saved_groups:
        common = members & set(saved["names"])
        if common and common != members:
            raise CheckpointError(
                f"optimizer state groups {_some(common)} apart from {_some(members - common)}: "
                f"was it saved with other penalties?"
            )
        if common:
            return same_options(options_of(group), {k: v for k, v in saved.items() if k != "names"})
    return options_of(group)


def _restored(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    name: str,
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    known = state_keys(optimizer, dict(group))
    if known is not None:
        _check_known(known, parameter, name, saved, may_be_empty=not isinstance(optimizer, Adagrad))
        saved = {key: _count(value) if key == "step" else value for key, value in saved.items()}
    return {key: _imported(key, value, parameter, group) for key, value in saved.items()}


def _check_known(
    known: set[str], parameter: Tensor, name: str, saved: Mapping[str, Any], *, may_be_empty: bool
) -> None:
    if saved.keys() != known and (saved or not may_be_empty):
        have, want = ", ".join(sorted(saved)) or "nothing", ", ".join(sorted(known)) or "nothing"
        raise CheckpointError(f"optimizer state of {name!r} holds {have}; it should hold {want}")
    for key in known.intersection(saved) - {"step"}:
        if saved[key].shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state of {name!r}: {key} is {tuple(saved[key].shape)}, "
                f"but the parameter is {tuple(parameter.shape)}"
            )


def _count(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32)


def _imported(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value.to("cpu", copy=True)
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    # Fused kernels walk parameter and state side by side: both need the same memory layout.
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
