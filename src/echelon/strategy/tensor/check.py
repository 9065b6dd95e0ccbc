"""Whether a model that was cut as the user says still computes what the whole one did.

A plan that cuts around something that looks at a whole row (a norm, a softmax) would train, and
train something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.core.errors import ConfigError
from echelon.core.interfaces import Task
from echelon.data.batch import to_device

SAMPLES = 4
_CLOSE = 1e-3


@contextmanager
def unchanged(task: Task, model: nn.Module, device: torch.device) -> Iterator[None]:
    """What `model` gives for a few samples must be the same before and after."""
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
    """With the same random numbers each time; no layer learns or counts."""
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
    return not bool(apart > near)  # what is not finite is another matter


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"tensor.plan does not fit the model: {why}; between layers cut by columns and the one cut "
        f"by rows, every value has to be treated by itself",
        ("tensor", "plan"),
    )
