"""Build a `Run` from a job and a task: strategy, ledger, loaders, checkpoints, early stopping.

`check_task` refuses a job and a task that contradict each other; `assemble` then builds every part
of the run except its folder. `set_up` builds only the strategy: it is called again when the members
change. `facts` describes the finished run for the observers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from echelon import optim, strategy
from echelon.checkpoint import Shelf, state
from echelon.checkpoint.store import CHECKPOINTS
from echelon.core.config import HealthSection, Job, OptimizerSection
from echelon.core.errors import ConfigError, DataError, TaskError, unknown
from echelon.core.interfaces import (
    BatchSource,
    Comm,
    Observer,
    RemoteStrategy,
    Schedule,
    Strategy,
    Task,
)
from echelon.core.types import Numerics, Parallel, Shard
from echelon.data.ledger import Ledger
from echelon.data.loader import Loader
from echelon.data.sources import DatasetSource
from echelon.loop.agreement import Fellows
from echelon.loop.leased_ledger import Leasing, SharedLedger
from echelon.loop.run import Limits, Run
from echelon.optim import gradients


def assemble(job: Job, task: Task, comm: Comm, observer: Observer) -> Run:
    """Build every part of a run except its folder, from a prepared and checked task."""
    device = find_device(job.device)
    state.seed(job.seed)
    limits = Limits.of(job)
    pending = strategy.remarks(job)
    schedule = optim.build_schedule(
        job.schedule, limits.total_steps(len(task.train), job.batch_size)
    )
    chosen = set_up(job, task, comm, schedule, observer)
    pending += chosen.remarks()
    if job.batch_size > len(task.train):
        pending.append(
            f"batch_size = {job.batch_size} is more than the {len(task.train)} training samples: "
            "each update uses all of them"
        )
    state.part_ways(job.seed, chosen.shard.index, 0)
    return Run(
        job=job,
        comm=comm,
        fellows=Fellows(comm, chosen.shard, job.seed),
        strategy=chosen,
        schedule=schedule,
        ledger=_ledger(len(task.train), comm, chosen),
        loader=Loader(
            task.train,
            seed=job.seed,
            augment=task.augment,
            micro=job.accumulate,
            shard=Shard() if chosen.apart else chosen.shard,
            prefetch=read_ahead(job, task.train),
            device=device,
        ),
        valid=held_out(job, task, device, chosen.shard),
        metrics=dict(task.metrics),  # type: ignore[arg-type]  # prepared: all are metrics
        shelf=Shelf(
            Path(CHECKPOINTS),
            keep=job.checkpoint.keep,
            notice=pending.append,
        ),
        observer=observer,
        pending=pending,
        limits=limits,
        early=optim.EarlyStop(
            mode=optim.stop_mode(job.stop.mode, job.stop.metric),
            patience=job.stop.patience,
            min_delta=job.stop.min_delta,
            target=job.stop.target,
        ),
    )


def _ledger(samples: int, comm: Comm, chosen: Strategy) -> Ledger:
    if chosen.apart:
        return SharedLedger(samples, cast(Leasing, comm), cast(RemoteStrategy, chosen))
    return Ledger(samples)


def set_up(job: Job, task: Task, comm: Comm, schedule: Schedule, observer: Observer) -> Strategy:
    """Build the job's strategy and set it up together with the other members."""
    chosen = strategy.build(
        job.strategy,
        numerics(job, find_device(job.device)),
        schedule,
        LayerHealth(job.health, observer.noticed),
        parallel(job, comm.count, task),
    )
    chosen.setup(task, comm)
    return chosen


def numerics(job: Job, device: torch.device) -> Numerics:
    return Numerics(
        device=device,
        optimizer=job.optimizer,
        clip=job.clip,
        precision=job.precision,
        recompute=job.recompute,
        compile=job.compile,
        micro=job.accumulate,
        batch=job.batch_size,
    )


def parallel(job: Job, members: int | None = None, task: Task | None = None) -> Parallel:
    return Parallel(
        mesh=strategy.arrangement(job, members),
        sync=job.sync,
        sharded=job.sharded,
        pipeline=job.pipeline,
        tensor=job.tensor,
        servers=job.parameter_server,
        plan=_plan(job, task) if task is not None and strategy.has_servers(job) else {},
        balance=job.elastic.balance,
    )


def _plan(job: Job, task: Task) -> dict[str, Any]:
    """Return what servers need of the job: when the learning rate changes, and when all members
    have to meet."""
    evaluates = task.valid is not None
    due = [job.checkpoint.every, *([job.evaluate.every] if evaluates else [])]
    return {
        "schedule": job.schedule.model_dump(mode="json"),
        "total": Limits.of(job).total_steps(len(task.train), job.batch_size),
        "samples": len(task.train),
        "steps": job.steps,
        "due": [every for every in due if isinstance(every, int)],
    }


def held_out(
    job: Job,
    task: Task,
    device: torch.device,
    shard: Shard = Shard(),  # noqa: B008 (a constant)
) -> Loader | None:
    """Return a loader of the validation samples in their own order, or None without any."""
    if task.valid is None:
        return None
    return Loader(
        task.valid,
        seed=job.seed,
        shuffle=False,
        shard=shard,
        prefetch=read_ahead(job, task.valid),
        device=device,
    )


def read_ahead(job: Job, source: BatchSource) -> int:
    """Return how many batches to read ahead.

    0 for a torch Dataset: it may draw random numbers, and these can only be repeated after a resume
    if the loop itself reads the samples.
    """
    return 0 if isinstance(source, DatasetSource) else job.data.prefetch


def find_device(name: str) -> torch.device:
    """Return the device: `auto` is a GPU if there is one, `cuda` is this process's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(unknown("device", name, ["auto", "cpu", "cuda"]), ("device",)) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(unknown("device", name, ["auto", "cpu", "cuda"]), ("device",))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs", ("device",)
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_task(job: Job, task: Task) -> None:
    """Refuse a job and a task that contradict each other, or this machine."""
    find_device(job.device)
    strategy.check_task(job, task)
    if task.train is None or len(task.train) == 0:
        raise TaskError(f"task {task.name!r} has no training samples")
    if task.optimizer is not None and job.optimizer != OptimizerSection():
        raise ConfigError(
            "the task brings its own optimizer: remove `optimizer` from the job", ("optimizer",)
        )
    if job.data.valid_path is not None and task.valid is not None:
        first = torch.zeros(1, dtype=torch.int64)
        if "y" in task.train.gather(first) and "y" not in task.valid.gather(first):
            raise DataError(
                f"{job.data.valid_path} has no target column: held-out figures cannot be computed"
            )
    known = ["loss", *task.metrics]
    if job.stop.metric not in known:
        raise ConfigError(unknown("stop.metric", job.stop.metric, known), ("stop", "metric"))
    if task.valid is None and (job.stop.patience or job.stop.target is not None):
        raise ConfigError("stop needs held-out samples, and this task has none", ("stop",))
    if task.valid is None and job.schedule.name == "plateau":
        raise ConfigError("schedule 'plateau' needs held-out samples", ("schedule", "name"))


def facts(job: Job, task: Task, run: Run, folder: Path) -> dict[str, Any]:
    """Return what the observers receive when a run starts."""
    return {
        "task": task.name,
        "model": job.model.get("name") or kind(run.strategy.model),
        "parameters": run.strategy.size(),
        "samples": len(task.train),
        "held_out": 0 if task.valid is None else len(task.valid),
        "total_steps": run.limits.total_steps(len(task.train), job.batch_size),
        "epochs": job.epochs,
        "batch_size": job.batch_size,
        "strategy": job.strategy,
        "workers": job.workers,
        "device": str(find_device(job.device)),
        "precision": job.precision,
        "threads": torch.get_num_threads(),
        "folder": str(folder),
        "about": dict(task.about),
    }


def kind(model: nn.Module) -> str:
    """Return the name of the model's class. torch's `fully_shard` swaps in a class of its own."""
    kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith(_DIVIDING))
    return next(kinds).__name__


_DIVIDING = "torch.distributed"


class LayerHealth:
    """An `Inspector` that reports layers whose gradient vanishes or explodes.

    Every `health.every` updates it compares the gradient norms of the layers. A layer is reported
    once per kind of trouble, and again only after it has recovered.
    """

    def __init__(self, section: HealthSection, notice: Notice) -> None:
        self._section = section
        self._notice = notice
        self._sick: set[tuple[str, str]] = set()

    def due(self, version: int) -> bool:
        return version % self._section.every == 0

    def inspect(
        self, version: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None:
        norms = gradients.layer_norms(grads.items())
        sizes = gradients.layer_norms(weights.items())
        largest = max(norms.values(), default=0.0)
        for name, norm in norms.items():
            self._judge(
                version,
                name,
                "vanishing",
                norm < self._section.vanishing * largest,
                f"gradient norm {norm:.2g}, the largest layer has {largest:.2g}",
            )
            self._judge(
                version,
                name,
                "exploding",
                norm > self._section.exploding * max(sizes[name], 1.0),
                f"gradient norm {norm:.2g}, weight norm {sizes[name]:.2g}",
            )

    def _judge(self, version: int, name: str, kind: str, sick: bool, figures: str) -> None:
        if not sick:
            self._sick.discard((name, kind))
        elif (name, kind) not in self._sick:
            self._sick.add((name, kind))
            self._notice(version, f"layer {name!r} is {kind}: {figures}")


Notice = Callable[[int, str], None]
