"""The model as a strategy holds it: on its device, compiled or recomputing if asked to."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.core.errors import CheckpointError, ConfigError, TaskError
from echelon.core.task import Task
from echelon.core.types import Numerics
from echelon.models import Normalise
from echelon.strategy.half import make_usable

_COMPILERS = ("g++", "clang++", "c++")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(task: Task, numerics: Numerics) -> nn.Module:
    """Make the model, or take the ready one, and set it up for training."""
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task.model gave a {type(model).__name__}: it must be a torch nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(f"{type(model).__name__} has no parameter to train")
    make_usable(numerics.device, numerics.precision)
    model.to(numerics.device)
    if numerics.device.type == "cpu":
        _channels_last(model)
    if numerics.recompute:
        for block in blocks(model):
            # Patched rather than wrapped: parameter names stay what they are.
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if numerics.compile:
        _check_compiler(numerics.device)
        model.compile()
    return model


def _channels_last(model: nn.Module) -> None:
    """A CPU convolves quicker where a pixel's channels lie side by side: 1.2 times measured.

    `to`, not `contiguous`: with one input channel a weight counts as lying either way, and as it
    came it would send what follows back to the other layout, which costs more than is won.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for a CPU; without a compiler it would fail at the first step."""
    if device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise ConfigError(
            f"compile: true needs a C++ compiler on this machine (one of {', '.join(_COMPILERS)})",
            ("compile",),
        )


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Names and parameters that are to be trained, each once."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [parameter for _, parameter in named]


def moving_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that a forward pass may change, such as batch norm's statistics."""
    fixed = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, Normalise)
        for buffer in module.buffers()
    }
    return [buffer for buffer in model.buffers() if id(buffer) not in fixed]


def release(model: nn.Module) -> None:
    """Give a model back as it came: without recomputing."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func is checkpoint:
            del module.__dict__["forward"]


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load all weights, or say which one does not fit."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise CheckpointError(f"the checkpoint does not fit the model: {lines[-1]}") from None


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the children of its longest list, or else the model itself."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    longest = max(lists, key=len, default=None)
    found = [child for child in longest if any(True for _ in child.parameters())] if longest else []
    return found or [model]


def autocast(numerics: Numerics) -> Callable[[], AbstractContextManager[object]]:
    """Enter this around forward and loss."""
    if numerics.precision == "fp32":
        return contextlib.nullcontext
    kind, dtype = numerics.device.type, _DTYPES[numerics.precision]
    return lambda: torch.autocast(kind, dtype)
