"""Which linear layers are cut, and how: derived for models that are known, else the user's word.

Layers come in groups: some that are cut by columns, then one that is cut by rows and so brings the
parts together again. What lies between them has to treat every value by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from echelon.core.config.sections import Cut as How
from echelon.core.errors import ConfigError, unknown
from echelon.models.gpt import Attention, FeedForward
from echelon.models.mlp import MLP

Plan = dict[str, How]
_PATH = ("tensor", "plan")
_ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
)


def planned(model: nn.Module, wishes: Mapping[str, How]) -> Plan:
    """Layer name → how it is cut, in the order of the model."""
    plan = _chosen(model, wishes) if wishes else _derived(model)
    if not plan:
        raise ConfigError(
            "strategy tensor does not know how to cut this model: say it in tensor.plan, layer by "
            "layer: columns or rows (known: gpt, and mlp without norm)",
            _PATH,
        )
    _check_order(plan)
    return plan


def _chosen(model: nn.Module, wishes: Mapping[str, How]) -> Plan:
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for pattern in wishes:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ConfigError(
                unknown("tensor.plan: linear layer", pattern, layers), (*_PATH, pattern)
            )
    found = {name: [wishes[p] for p in wishes if fnmatchcase(name, p)] for name in layers}
    return {name: hows[0] for name, hows in found.items() if hows}


def _derived(model: nn.Module) -> Plan:
    plan: Plan = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, Attention):
            plan |= {f"{prefix}qkv": "columns", f"{prefix}out": "rows"}
        elif isinstance(part, FeedForward):
            plan |= {f"{prefix}up": "columns", f"{prefix}out": "rows"}
        elif isinstance(part, MLP):
            plan |= {f"{prefix}{layer}": how for layer, how in _of_mlp(part)}
    return plan


def _of_mlp(model: MLP) -> Iterator[tuple[str, How]]:
    """Pairs of neighbours with nothing but elementwise layers between them."""
    waiting: str | None = None
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            if waiting is not None:
                yield waiting, "columns"
                yield name, "rows"
            waiting = name if waiting is None else None
        elif not isinstance(part, (*_ELEMENTWISE, nn.Sequential)):
            waiting = None


def _check_order(plan: Plan) -> None:
    """Parts that are made have to be brought together; what is brought together has to be made."""
    open_since: str | None = None
    for name, how in plan.items():
        if how == "columns":
            open_since = name
        elif open_since is None:
            raise ConfigError(
                f"tensor.plan: {name!r} is cut by rows, but no layer before it by columns", _PATH
            )
        else:
            open_since = None
    if open_since is not None:
        raise ConfigError(
            f"tensor.plan: {open_since!r} is cut by columns, but no layer after it by rows", _PATH
        )
