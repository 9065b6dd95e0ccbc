"""Build the model: device, compile, recompute, precision, tables."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError, ConfigError, TaskError
from echelon.core.interfaces import Task
from echelon.core.types import Batch, Numerics, Sparse
from echelon.models import Normalise
from echelon.models.table import Table
from echelon.optim import gradients
from echelon.optim.tables import RowGradients, Rows, merged

# --- replica ---
# The model as a strategy holds it: on its device, compiled or recomputing if asked to.

_COMPILERS = ("g++", "clang++", "c++")
Home: TypeAlias = "tuple[dict[str, Tensor], str]"
"""Where a buffer is: those of its module, and its name among them."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(task: Task, numerics: Numerics) -> nn.Module:
    """Make the model, or take the ready one, and set it up for training."""
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
    """Refuse what no strategy can train, before anything is built on it."""
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


def _recomputing(block: nn.Module, *, compiled: bool) -> Callable[..., Any]:
    """Running statistics move when samples go forward, not when they are recomputed."""
    again = functools.partial(checkpoint, block.forward, use_reentrant=False)
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    if compiled or not norms:  # the compiler sees to it itself, and takes no context
        return again

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        homes = [home for norm in norms for home in moving_buffers(norm)]
        return nullcontext(), unmoved(homes)

    return functools.partial(again, context_fn=contexts)


@contextlib.contextmanager
def unmoved(homes: Sequence[Home]) -> Iterator[None]:
    """Whatever is done to these buffers meanwhile is done to copies."""
    own = [held[name] for held, name in homes]
    for (held, name), buffer in zip(homes, own, strict=True):
        held[name] = buffer.clone()
    try:
        yield
    finally:
        for (held, name), buffer in zip(homes, own, strict=True):
            held[name] = buffer


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


def moving_buffers(model: nn.Module) -> list[Home]:
    """Where the buffers are that a forward pass may change, such as batch norm's statistics."""
    homes: dict[Tensor, Home] = {}
    for module in model.modules():
        if isinstance(module, Normalise):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                homes.setdefault(buffer, (cast("dict[str, Tensor]", module._buffers), name))
    return list(homes.values())


def release(model: nn.Module) -> None:
    """Give a model back as it came: without recomputing."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func is checkpoint:
            give_back(module, patched.args[0])


def give_back(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Undo a patch: `forward` is the module's own again, or what was patched in before."""
    del module.__dict__["forward"]
    if module.forward != forward:
        module.forward = forward


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
        return nullcontext
    kind, dtype = numerics.device.type, _DTYPES[numerics.precision]
    return lambda: torch.autocast(kind, dtype)


# --- half ---
# Half precision on CPUs that promise more than they keep.
#
# Some virtual machines announce matrix instructions (AMX) that then end the process with an
# illegal instruction. So before a run computes in half precision on a CPU, a child process tries
# it; if the child dies, the kernels that kill it are switched off, the narrowest way that helps.

_DEADLINE = 20.0
_WITHOUT_AMX = "AVX512_CORE_BF16"


def state_of_bf16() -> Literal["works", "works without AMX", "crashes"]:
    """What `precision: bf16` is like on this CPU."""
    if _survives(torch.bfloat16):
        return "works"
    os.putenv("ONEDNN_MAX_CPU_ISA", _WITHOUT_AMX)
    return "works without AMX" if _survives(torch.bfloat16) else "crashes"


def make_usable(device: torch.device, precision: str) -> None:
    """Make sure that this precision works on this device, or refuse it."""
    if device.type == "cpu" and precision != "fp32":
        _make_usable(precision)


@functools.cache
def _make_usable(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    if _survives(dtype):
        return
    # Heeded only if no such kernel ran yet in this process; its children inherit it.
    os.putenv("ONEDNN_MAX_CPU_ISA", _WITHOUT_AMX)
    if _survives(dtype):
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if not _survives(dtype):
        raise ConfigError(
            f"precision {precision!r} ends the process on this CPU: use fp32", ("precision",)
        )
    logging.getLogger("echelon").warning(
        "%s is slow in this process: its fast kernels crash on this CPU, and it was too late to "
        "choose others; a new process with ONEDNN_MAX_CPU_ISA=%s is fast",
        precision,
        _WITHOUT_AMX,
    )


def _survives(dtype: torch.dtype) -> bool:
    """Whether a child process comes through what a training step does."""
    child = os.fork()
    if child == 0:
        _try(dtype)
    status = None
    try:
        status = _awaited(child)
    finally:
        if status is None:  # too slow, or this process was interrupted: nobody is left behind
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return status == 0


def _awaited(child: int) -> int | None:
    """How it ended; None if it did not in time."""
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _try(dtype: torch.dtype) -> None:
    """Products and convolutions, small and large, forward and backward; never returns."""
    code = 1
    try:
        faulthandler.disable()  # to be killed here is an answer, not a fault to report
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # the parent's worker threads do not exist in a forked child
        for size in (32, 256):
            x = torch.ones(size, size, dtype=dtype, requires_grad=True)
            (x @ x).sum().backward()
        image = torch.ones(4, 16, 12, 12, dtype=dtype, requires_grad=True)
        filters = torch.ones(32, 16, 3, 3, dtype=dtype, requires_grad=True)
        torch.nn.functional.conv2d(image, filters).sum().backward()
        code = 0
    finally:
        os._exit(code)


# --- tables ---
# The tables of a model: rows that are no parameters, with updates of their own.


def open_tables(model: nn.Module, optimizer: OptimizerSection | None) -> None:
    """Give every table that has none a store in this process."""
    for table in tables_of(model):
        if table.store is None:
            table.store = Rows(table.spec(optimizer))


def tables_of(model: nn.Module) -> list[Table]:
    """Each once, in the model's order."""
    found: dict[str, Table] = {}
    for module in model.modules():
        if isinstance(module, Table) and found.setdefault(module.name, module) is not module:
            raise TaskError(f"two tables are called {module.name!r}: give each its own name")
    return list(found.values())


def lookups(
    forward: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch
) -> Sequence[tuple[Table, Tensor | Sparse]]:
    """What the model will look up for a batch, if it has a method `lookups` that says so.

    That one takes what the model itself would be called with, and so it is called as the model is.
    """
    told = getattr(model, "lookups", None)
    if told is None:
        return ()

    def ask(*inputs: Any, **others: Any) -> None:
        raise _Told(told(*inputs, **others))  # what is done with the model's answer is left out

    try:
        forward(cast(nn.Module, ask), batch)
    except _Told as found:
        return found.pairs
    return ()


class _Told(Exception):
    def __init__(self, pairs: Sequence[tuple[Table, Tensor | Sparse]]) -> None:
        super().__init__()
        self.pairs = pairs


def remote_state(model: nn.Module) -> dict[str, Tensor]:
    """The rows that are kept elsewhere, under the names they would have in the model's state."""
    stores: dict[int, dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Table) and module.store is not None and module.store.remote:
            if id(module) not in stores:
                stores[id(module)] = module.store.state()
            found |= {f"{path}.{key}": value for key, value in stores[id(module)].items()}
    return found


class RowUpdates:
    """The rows' part of an update: gradients that were left by backward, until they are pushed."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = tables_of(model)
        self._found: list[RowGradients | None] | None = None

    def gradients(self) -> list[Tensor]:
        """One tensor for each table with a gradient. The same ones until `clear`."""
        return [found.sums for found in self.found() if found is not None]

    def found(self) -> list[RowGradients | None]:
        """For each table, the sums over all micro-batches."""
        if self._found is None:
            self._found = [_summed(table) for table in self.tables]
        return self._found

    def push(self, factor: float, version: int) -> None:
        """Make the update of every table; `clear` follows."""
        for table, found in zip(self.tables, self.found(), strict=True):
            assert table.store is not None, "tables are opened when the model is built"
            if found is not None:
                table.store.push(*found, factor=factor, version=version)

    def first_non_finite(self) -> str | None:
        """The first table with a gradient that is not finite."""
        named = [
            (table.name, found.sums)
            for table, found in zip(self.tables, self.found(), strict=True)
            if found is not None
        ]
        return gradients.first_non_finite(named)

    def clear(self) -> None:
        """Drop what was pushed, or will never be."""
        for table in self.tables:
            table.drop()
        self._found = None


def _summed(table: Table) -> RowGradients | None:
    parts = [RowGradients(*found) for found in table.take()]
    return merged(parts) if parts else None
