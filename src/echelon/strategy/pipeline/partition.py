"""Decide which layers make which stage of a pipeline.

    member 0:  find the layers ─▶ measure what each costs ─▶ cut where the slowest stage is fastest
               ─▶ broadcast to all members

If the job names the layers where stages begin (`pipeline.split`), nothing is measured.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.core.config.sections import PipelineSection
from echelon.core.errors import ConfigError, TaskError, unknown
from echelon.core.interfaces import Task, call_model
from echelon.core.types import Batch
from echelon.data.batch import to_device
from echelon.strategy.pipeline.line import can_pass

INTERLEAVED = 2
"""Stages of each member under the interleaved schedule."""


def decide(
    model: nn.Module,
    task: Task,
    section: PipelineSection,
    members: int,
    world: Collective,
    autocast: Autocast,
    samples: int,
) -> Cut:
    """Decide on the stages. All members call this together; member 0 raises the errors.

    Layers are timed with `samples` samples, as many as a micro-batch has: the time of some grows
    with their number, that of others (a large table's gradient) does not.
    """
    stages = stage_count(section, members)
    if world.index == 0:
        batch = first_samples(task, samples, next(model.parameters()).device)
        return _broadcast(model, world, _decide_here(model, task, section, stages, autocast, batch))
    return _broadcast(model, world, None)


def stage_count(section: PipelineSection, members: int) -> int:
    """Return the number of stages. A given split must fit the members and the schedule."""
    interleaved = section.schedule == "interleaved_1f1b"
    if not section.split:
        return members * (INTERLEAVED if interleaved else 1)
    stages = len(section.split) + 1
    fits = stages % members == 0 if interleaved else stages == members
    if not fits:
        rule = f"a multiple of {members} stages" if interleaved else f"{members} stages"
        raise ConfigError(
            f"pipeline.split names {len(section.split)} layers, which makes {stages} stages; "
            f"schedule {section.schedule!r} with {members} members needs {rule}",
            ("pipeline", "split"),
        )
    return stages


def _decide_here(
    model: nn.Module,
    task: Task,
    section: PipelineSection,
    stages: int,
    autocast: Autocast,
    batch: Batch,
) -> Cut:
    with traceless(model):
        layers = find_layers(model, lambda whole: task.forward(whole, batch))
        x = entrance(task.forward, batch)
        if len(layers) < stages:
            raise ConfigError(
                f"{stages} stages are more than the {len(layers)} layers of "
                f"{type(model).__name__} ({', '.join(layers)})",
                ("mesh", "pipeline"),
            )
        if section.split:
            return Cut(tuple(layers), tuple(by_names(layers, section.split)))
        costs = measure([model.get_submodule(name) for name in layers], x, autocast)
        return Cut(tuple(layers), tuple(balanced(costs, stages)))


def first_samples(task: Task, count: int, device: torch.device) -> Batch:
    if task.train is None or not len(task.train):
        raise TaskError("strategy 'pipeline' tries the model on training samples: there are none")
    rows = torch.arange(min(count, len(task.train)))
    batch: Batch = to_device(task.train.gather(rows), device)
    return batch


def _broadcast(model: nn.Module, world: Collective, chosen: Cut | None) -> Cut:
    """Broadcast the cut. Layers are sent as numbers among all modules: all built the same model."""
    names = [name for name, _ in model.named_modules()]
    mine = [] if chosen is None else [len(chosen.layers), len(chosen.starts)]
    layers, stages = map(int, world.sum(mine or [0, 0]))
    numbers = torch.zeros(layers + stages, dtype=torch.int64)
    if chosen is not None:
        numbers[:layers] = torch.tensor([names.index(layer) for layer in chosen.layers])
        numbers[layers:] = torch.tensor(chosen.starts)
    world.broadcast_([numbers])
    found = numbers.tolist()
    return Cut(tuple(names[at] for at in found[:layers]), tuple(found[layers:]))


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers by name, and the numbers of those with which the stages begin."""

    layers: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def stages(self) -> list[tuple[str, ...]]:
        ends = [*self.starts[1:], len(self.layers)]
        return [self.layers[start:end] for start, end in zip(self.starts, ends, strict=True)]


Autocast = Callable[[], AbstractContextManager[object]]


# The layers of a model that is a chain, found by watching it at work
#
# A module is a chain if each of its children takes what the one before it gave, and nothing else
# happens: `nn.Sequential`, and modules that do the same in their forward. A child may be called
# several times. Chains in chains are taken apart, too; a module that is not a chain (a residual
# block, say) is a layer.


def find_layers(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[str]:
    """Return the names of the layers in the order of their calls. `run` calls the model once."""
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
        return False  # it computes something itself, or is patched to do so
    called = [each.module for each in inner]
    if not inner or set(called) != set(module.children()):
        return False
    if any(True for each in _repeated(called) for _ in each.buffers()):
        return False  # a repeated child may be at two members, which cannot share its statistics
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
    """Record every call below `root` while inside."""
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


@dataclass(slots=True)
class _Call:
    """A call of a module, and the calls that it made in turn."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    inner: list[_Call] = field(default_factory=list)


# A task's `forward` in a pipeline
#
# No member has the complete model, so `forward` cannot call it. It may choose and prepare the
# model's one input, and has to return what the model gave: a pipeline can follow no more than that.


Forward = Callable[[nn.Module, Batch], Any]


def entrance(forward: Forward, batch: Batch) -> Any:
    """Return the input of the first layer: what `forward` gives to the model."""
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


class _Stand(nn.Module):
    """A stand-in for the model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Any, ...]] = []
        self.answer = object()

    def forward(self, *given: Any) -> Any:
        self.given.append(given)
        return self.answer


def _refused(why: str) -> TaskError:
    return TaskError(
        f"strategy 'pipeline' needs a task.forward that calls the model once, with one value, and "
        f"returns what it gives: {why}"
    )


# The cost of each layer: forward and backward, measured on real samples


REPEATS = 3
BYTES_PER_SECOND = 1e9
"""Speed between two members, for gloo on one host. It only decides between cuts of similar time."""


class Cost(NamedTuple):
    """The cost of one layer."""

    seconds: float
    passing: float
    """Seconds to send its output and the output's gradient, if the model is cut behind it."""


def measure(
    layers: Sequence[nn.Module], x: Any, autocast: Callable[[], AbstractContextManager[object]]
) -> list[Cost]:
    """Time each layer on the output of the one before it; keep the fastest of a few times."""
    costs: list[Cost] = []
    for layer in layers:
        y, seconds = _timed(layer, x, autocast)
        for _ in range(REPEATS):
            y, again = _timed(layer, x, autocast)
            seconds = min(seconds, again)
        costs.append(Cost(seconds, _passing(y)))
        layer.zero_grad(set_to_none=True)
        x = y.detach() if isinstance(y, Tensor) else y
    return costs


def _timed(
    layer: nn.Module, x: Any, autocast: Callable[[], AbstractContextManager[object]]
) -> tuple[Any, float]:
    if isinstance(x, Tensor):
        learnt = x.is_floating_point()
        x = x.detach().requires_grad_(learnt).clone()  # the layer may write over it
    start = _clock(x)
    with autocast():
        y = layer(x)
    if isinstance(y, Tensor) and y.requires_grad:
        y.backward(torch.ones_like(y))
    return y, _clock(y) - start


def _clock(x: Any) -> float:
    if isinstance(x, Tensor) and x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _passing(y: Any) -> float:
    if not can_pass(y):
        return float("inf")
    return 2 * y.numel() * y.element_size() / BYTES_PER_SECOND


@contextmanager
def traceless(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and random states after the code inside."""
    buffers = list(model.buffers())
    kept = [buffer.clone() for buffer in buffers]
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
        model.zero_grad(set_to_none=True)


# Where a chain of layers is cut into stages


_AT = ("pipeline", "split")


def balanced(costs: Sequence[Cost], stages: int) -> list[int]:
    """Return where each stage begins, so that the slowest stage is as fast as possible.

    Among equal cuts, choose the one whose other stages are the most even.
    """
    until = [0.0, *accumulate(cost.seconds for cost in costs)]
    count = len(costs)

    def time(start: int, stop: int) -> float:
        passing = costs[stop - 1].passing if stop < count else 0.0
        return until[stop] - until[start] + passing

    # best[stop]: (slowest stage, Σ time², beginnings) of the layers before `stop`
    best = [(time(0, stop), time(0, stop) ** 2, [0]) for stop in range(1, count + 1)]
    best = [(math.inf, math.inf, []), *best]
    for stage in range(2, stages + 1):
        best = [
            min(
                (
                    (
                        max(best[start][0], time(start, stop)),
                        best[start][1] + time(start, stop) ** 2,
                        [*best[start][2], start],
                    )
                    for start in range(stage - 1, stop)
                ),
                default=(math.inf, math.inf, []),
            )
            for stop in range(count + 1)
        ]
    slowest, _, starts = best[count]
    if not math.isfinite(slowest):
        raise ConfigError(
            f"the model cannot be cut into {stages} stages: between too many of its layers "
            f"passes something else than one tensor",
            ("mesh", "pipeline"),
        )
    return starts


def by_names(layers: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return where each stage begins, as the user says. A chain's name means its first layer."""
    starts = [0]
    for name in wanted:
        found = [at for at, layer in enumerate(layers) if f"{layer}.".startswith(f"{name}.")]
        if not found:
            raise ConfigError(unknown("pipeline.split: layer", name, layers), _AT)
        starts.append(found[0])
    for before, after in pairwise(starts):
        if after <= before:
            raise ConfigError(
                f"pipeline.split: layer {layers[after]!r} does not come after "
                f"{layers[before]!r}, where the stage before it begins "
                f"(layers: {', '.join(layers)})",
                _AT,
            )
    return starts
