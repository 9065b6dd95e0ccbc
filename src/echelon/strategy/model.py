"""The model as a strategy holds it: on its device, and compiled or recomputing if the job says so.

`build_model` sets a model up for training, `release` undoes its patches. Recomputing is patched
into the forward methods of the model's repeated blocks, so that parameter names do not change.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from echelon.core.errors import CheckpointError, ConfigError, TaskError
from echelon.core.interfaces import Task
from echelon.core.types import Numerics
from echelon.models import Normalise
from echelon.strategy.half_precision import make_usable
from echelon.strategy.tables import open_tables

Home: TypeAlias = "tuple[dict[str, Tensor], str]"
"""Where a buffer is: the buffers of its module, and its name among them."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPILERS = ("g++", "clang++", "c++")


def build_model(task: Task, numerics: Numerics) -> nn.Module:
    """Build the model, or take the task's ready one, and set it up for training."""
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task.model gave a {type(model).__name__}: it must be a torch nn.Module")
    _check_trainable(model)
    make_usable(numerics.device, numerics.precision)
    open_tables(model, numerics.optimizer if task.optimizer is None else None)
    model.to(numerics.device)
    if numerics.device.type == "cpu":
        _channels_last(model)
    if numerics.recompute:
        for block in blocks(model):
            # Patched rather than wrapped: parameter names stay what they are.
            block.forward = _recomputing(block, compiled=numerics.compile)
    if numerics.compile:
        _check_compiler(numerics.device)
        model.compile()
    return model


def _check_trainable(model: nn.Module) -> None:
    """Refuse parameters that no strategy can train, before anything is built on them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"layer {name!r} makes sparse gradients, which are not supported: "
                f"build it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise TaskError(
                f"parameter {name!r} has no shape yet: give its layer the number of its inputs"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise TaskError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, which is "
                f"not supported: keep real and imaginary parts in one of floats "
                f"(torch.view_as_complex)"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"{type(model).__name__} has no parameter to train")


def _channels_last(model: nn.Module) -> None:
    """Lay out convolutions channels-last: measured 1.2 times faster on a CPU.

    `to`, not `contiguous`: with one input channel, a weight counts as contiguous in both layouts.
    Unchanged, it would make the layers after it use the other layout, which costs more than is won.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: its longest list of layers, or the model itself."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    longest = max(lists, key=len, default=None)
    found = [child for child in longest if any(True for _ in child.parameters())] if longest else []
    return found or [model]


def _recomputing(block: nn.Module, *, compiled: bool) -> Callable[..., Any]:
    """Return a forward method that recomputes the block's activations in backward.

    Running statistics must move in the first pass only, so the second one works on copies of them.
    """
    again = functools.partial(checkpoint, block.forward, use_reentrant=False)
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    if compiled or not norms:  # the compiler handles this itself, and accepts no context
        return again

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        homes = [home for norm in norms for home in moving_buffers(norm)]
        return nullcontext(), unmoved(homes)

    return functools.partial(again, context_fn=contexts)


@contextlib.contextmanager
def unmoved(homes: Sequence[Home]) -> Iterator[None]:
    """Replace these buffers by copies while inside, so that the originals keep their values."""
    own = [held[name] for held, name in homes]
    for (held, name), buffer in zip(homes, own, strict=True):
        held[name] = buffer.clone()
    try:
        yield
    finally:
        for (held, name), buffer in zip(homes, own, strict=True):
            held[name] = buffer


def moving_buffers(model: nn.Module) -> list[Home]:
    """Return the buffers that a forward pass may change, such as batch norm's statistics."""
    homes: dict[Tensor, Home] = {}
    for module in model.modules():
        if isinstance(module, Normalise):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                homes.setdefault(buffer, (cast("dict[str, Tensor]", module._buffers), name))
    return list(homes.values())


def _check_compiler(device: torch.device) -> None:
    """Refuse `compile` without a C++ compiler: on a CPU it would fail at the first step."""
    if device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise ConfigError(
            f"compile: true needs a C++ compiler on this machine (one of {', '.join(_COMPILERS)})",
            ("compile",),
        )


def release(model: nn.Module) -> None:
    """Undo the patches of `build_model`: the model no longer recomputes activations."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func is checkpoint:
            give_back(module, patched.args[0])


def give_back(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Undo a patch: restore the module's own `forward`, or an earlier patch."""
    del module.__dict__["forward"]
    if module.forward != forward:
        module.forward = forward


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load all weights; raise CheckpointError with the first that does not fit."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise CheckpointError(f"the checkpoint does not fit the model: {lines[-1]}") from None


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Return names and parameters that are trained, each once."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [parameter for _, parameter in named]


def autocast(numerics: Numerics) -> Callable[[], AbstractContextManager[object]]:
    """Return the context of forward and loss: autocast to half precision, or nothing for fp32."""
    if numerics.precision == "fp32":
        return nullcontext
    kind, dtype = numerics.device.type, _DTYPES[numerics.precision]
    return lambda: torch.autocast(kind, dtype)
