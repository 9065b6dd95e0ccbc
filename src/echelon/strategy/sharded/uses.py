"""Which layers' weights a model uses outside of the layers that hold them.

A layer that is gathered by itself has whole weights only while it is called. Some are read from
elsewhere: a table of places that is added, an output layer that attention multiplies with itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from echelon.core.interfaces import Task
from echelon.core.types import Batch
from echelon.data.batch import to_device
from echelon.data.loader import PositionDraws

_SAMPLES = 2


def first_samples(task: Task, device: torch.device) -> Batch | None:
    """As the model will get them; None if the task's samples are not at hand."""
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
    """Those of `parts` of which a weight is used while they are not being called."""
    training, watch = model.training, _Watch(parts)
    model.eval()  # running statistics stay; and evaluation has shorter ways that read more weights
    try:
        with torch.random.fork_rng(), torch.no_grad(), watch.called(), watch:
            go()
    finally:
        model.train(training)
    return watch.found


class _Watch(TorchFunctionMode):
    """Looks at what the functions of torch are given."""

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
        """Know which parts are under way."""
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
        if getattr(func, "__name__", "") != "__get__":  # a shape or a dtype can be asked any time
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    idle = [part for part in self._holders.get(leaf, ()) if not self._active[part]]
                    self.found.update(idle)
        return func(*args, **kwargs)
