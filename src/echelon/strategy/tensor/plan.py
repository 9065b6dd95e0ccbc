"""Which linear layers are cut, and how: derived for known models, else chosen by the job.

Layers come in groups: some that are cut by columns, then one that is cut by rows and so brings the
parts together again. Everything between them has to treat every value by itself. A plan that cuts
around a layer that looks at a complete row (a norm, a softmax) would train, but train something
else, so `unchanged` compares the outputs of the model before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.core.config.sections import Cut as How
from echelon.core.errors import ConfigError, unknown
from echelon.core.interfaces import Task
from echelon.data.batch import to_device
from echelon.models.gpt import Attention, FeedForward
from echelon.models.mlp import MLP

Plan = dict[str, How]


def planned(model: nn.Module, wishes: Mapping[str, How]) -> Plan:
    """Return how each layer is cut, by name, in the order of the model."""
    plan = _chosen(model, wishes) if wishes else _derived(model)
    if not plan:
        raise ConfigError(
            "strategy tensor does not know how to cut this model: say it in tensor.plan, layer by "
            "layer: columns or rows (known: gpt, and mlp without norm)",
            _PATH,
        )
    _check_order(plan)
    return plan


_PATH = ("tensor", "plan")


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
    """Yield pairs of neighboring layers with only elementwise layers between them."""
    waiting: str | None = None
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            if waiting is not None:
                yield waiting, "columns"
                yield name, "rows"
            waiting = name if waiting is None else None
        elif not isinstance(part, (*_ELEMENTWISE, nn.Sequential)):
            waiting = None


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


def _check_order(plan: Plan) -> None:
    """Refuse a cut by columns without a cut by rows after it, and the other way round."""
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


# Checking a plan: does the cut model compute what the complete one did?


SAMPLES = 4
_CLOSE = 1e-3


@contextmanager
def unchanged(task: Task, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise ConfigError if the code inside changes what `model` computes for a few samples."""
    if task.train is None or not len(task.train):
        yield
        return
    rows = torch.arange(min(SAMPLES, len(task.train)))
    batch = to_device(task.train.gather(rows), device)
    before = _given(model, lambda: task.forward(model, batch))
    yield
    try:
        after = _given(model, lambda: task.forward(model, batch))
    except RuntimeError as error:
        raise _refused(str(error).partition("\n")[0]) from None
    if len(before) != len(after) or not all(map(_close, before, after)):
        raise _refused("the model then gives something else")


def _given(model: nn.Module, forward: Callable[[], Any]) -> list[Tensor]:
    """Return the model's outputs in evaluation mode, with the same random numbers every time."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(0)
            found = forward()
    finally:
        model.train(training)
    return [leaf.clone() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or not one.numel():
        return True
    near = max(_CLOSE, 16 * torch.finfo(one.dtype).eps)
    apart = (one - other).abs().max() / one.abs().max().clamp(min=1e-12)
    return not bool(apart > near)  # NaN compares as close: finding it is not the purpose here


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"tensor.plan does not fit the model: {why}; between layers cut by columns and the one cut "
        f"by rows, every value has to be treated by itself",
        ("tensor", "plan"),
    )
