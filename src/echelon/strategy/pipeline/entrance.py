"""What a task's `forward` gives to the model.

In a pipeline nobody has the whole model, so `forward` cannot call it. It may choose and prepare the
model's one input, and has to give back what the model gave: that is all a pipeline can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from echelon.core.errors import TaskError
from echelon.core.interfaces import call_model
from echelon.core.types import Batch

Forward = Callable[[nn.Module, Batch], Any]


class _Stand(nn.Module):
    """Stands in for the model, to see what it would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Any, ...]] = []
        self.answer = object()

    def forward(self, *given: Any) -> Any:
        self.given.append(given)
        return self.answer


def entrance(forward: Forward, batch: Batch) -> Any:
    """The input of the first layer."""
    if forward is call_model:
        return batch["x"]
    stand = _Stand()
    try:
        answer = forward(stand, batch)
    except (AttributeError, TypeError) as error:
        raise _refused(f"it fails where the model is not at hand ({error})") from error
    if len(stand.given) != 1 or len(stand.given[0]) != 1:
        times = ", ".join(f"with {len(given)} values" for given in stand.given) or "never"
        raise _refused(f"it calls the model {times}")
    if answer is not stand.answer:
        raise _refused("it changes what the model gives")
    return stand.given[0][0]


def _refused(why: str) -> TaskError:
    return TaskError(
        f"strategy 'pipeline' needs a task.forward that calls the model once, with one value, and "
        f"returns what it gives: {why}"
    )
