"""The layers of a model that is a chain, found by watching it at work.

A module is a chain if each of its children takes what the one before it gave, and nothing else
happens: `nn.Sequential`, and whatever does the same by hand. A child may come by several times.
Chains in chains are taken apart too; what is not a chain (a residual block, say) is a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from echelon.core.errors import TaskError


@dataclass(slots=True)
class _Call:
    """A module at work, and the modules it called in turn."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    inner: list[_Call] = field(default_factory=list)


def find_layers(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[str]:
    """The names of the layers in the order they are passed; `run` calls the model once."""
    root = _Call(model, (), {})
    with _watched(model, root), torch.no_grad():
        run(model)
    names = {module: name for name, module in model.named_modules()}
    if len(root.inner) != 1 or root.inner[0].module is not model:
        raise TaskError("task.forward does not call the model itself, once")
    layers = list(_layers(root.inner[0]))
    if layers == [model]:
        raise TaskError(
            f"strategy 'pipeline' needs a model that is a chain of layers, each given what the one "
            f"before it gave, as in nn.Sequential: {type(model).__name__} is not"
        )
    return [names[layer] for layer in layers]


def _layers(call: _Call) -> Iterator[nn.Module]:
    if not _is_chain(call):
        yield call.module
        return
    for inner in call.inner:
        yield from _layers(inner)


def _is_chain(call: _Call) -> bool:
    module, inner = call.module, call.inner
    if module._parameters or module._buffers or "forward" in module.__dict__:
        return False  # it does something itself, or is patched to
    called = [each.module for each in inner]
    if not inner or set(called) != set(module.children()):
        return False
    if any(True for each in _repeated(called) for _ in each.buffers()):
        return False  # what it counts, it could not count at two places
    if len(call.args) != 1 or call.kwargs:
        return False
    given = call.args[0]
    for each in inner:
        if each.kwargs or len(each.args) != 1 or each.args[0] is not given:
            return False
        given = each.output
    return call.output is given


def _repeated(called: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for module, times in Counter(called).items() if times > 1]


@contextmanager
def _watched(model: nn.Module, root: _Call) -> Iterator[None]:
    """Note every call below `root` while this lasts."""
    under_way = [root]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _Call(module, args, kwargs)
        under_way[-1].inner.append(call)
        under_way.append(call)

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        under_way.pop().output = output

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
