"""Small tasks that every strategy has to train alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.comm import Alone
from echelon.comm.group import Group
from echelon.comm.peers import Place
from echelon.core.config import ClipSection, OptimizerSection, ScheduleSection
from echelon.core.interfaces import Comm, Strategy, Task
from echelon.core.types import Batch, Numerics, Parallel
from echelon.optim import build_schedule
from echelon.strategy import build

from . import serving

SAMPLES, FEATURES, CLASSES = 103, 6, 3  # 103 does not divide evenly


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return {"x": x, "y": y}


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def task(model: nn.Module | Callable[[], nn.Module] = mlp) -> Task:
    return Task(model=model, loss=cross_entropy)


def batches(size: int = 16, count: int = 20) -> list[Batch]:
    """`count` batches of `size` over and over the data; the last of a pass is smaller."""
    columns, start = data(), 0
    found: list[Batch] = []
    while len(found) < count:
        stop = min(start + size, SAMPLES)
        found.append({name: column[start:stop] for name, column in columns.items()})
        start = stop % SAMPLES
    return found


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch in parts of these sizes."""
    parts = {name: column.split(list(sizes)) for name, column in batch.items()}  # type: ignore[union-attr]
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(len(sizes))]


def strategy(
    name: str,
    chosen: Task | None = None,
    *,
    precision: str = "fp32",
    optimizer: OptimizerSection | None = None,
    clip: ClipSection | None = None,
    recompute: bool = False,
    compile: bool = False,
    schedule: ScheduleSection | None = None,
    micro: int = 1,
    batch: int | None = None,
    parallel: Parallel | None = None,
    comm: Comm | None = None,
) -> Strategy:
    """Set up among the members of `comm`, or alone."""
    numerics = Numerics(
        device=torch.device("cpu"),
        optimizer=optimizer or OptimizerSection(name="momentum", lr=0.1),
        clip=clip or ClipSection(),
        precision=precision,
        recompute=recompute,
        compile=compile,
        micro=micro,
        batch=batch,
    )
    rates = build_schedule(schedule or ScheduleSection(), 20)
    if name == "parameter_server":
        plan = {"schedule": (schedule or ScheduleSection()).model_dump(mode="json"), "total": 20}
        parallel = dataclasses.replace(parallel or Parallel(), plan=plan)
    built = build(name, numerics, rates, None, parallel)
    built.setup(chosen or task(), comm or _alone(name))
    if built.remote:
        serving.CONNECTED.append(built)
    return built


def _alone(name: str) -> Comm:
    if name == "parameter_server":
        return serving.alone()
    return Alone() if name == "single" else Group(Place(0, 1))


def steps(strategy: Strategy, micros: Sequence[Sequence[Batch]]) -> None:
    for micro in micros:
        strategy.compute(micro)
        assert strategy.update().committed


def weights(strategy: Strategy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in strategy.model.state_dict().items()}


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest weight of its tensor; endless if any is."""
    assert left.keys() == right.keys()
    found = [
        float((left[n] - right[n]).abs().max() / right[n].abs().max().clamp(min=1e-12))
        for n in left
        if left[n].numel()
    ]
    return max(found) if all(map(math.isfinite, found)) else math.inf  # `max` passes over nan
