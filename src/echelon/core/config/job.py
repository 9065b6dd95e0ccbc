"""`Job`: the top-level keys of a job file, which are also the keywords of `echelon.train`.

The sections are defined in sections.py; here are only the rules between them. A resolved job, with
all defaults filled in, is stored with its run.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from echelon.core.config.sections import (
    CheckpointSection,
    ClipSection,
    DataSection,
    ElasticSection,
    EvaluateSection,
    HealthSection,
    Mesh,
    OptimizerSection,
    ParameterServerSection,
    PipelineSection,
    ScheduleSection,
    Section,
    SettingError,
    ShardedSection,
    StopSection,
    SyncSection,
    TensorSection,
    TrackSection,
)

DEFAULT_EPOCHS = 10
Precision = Literal["fp32", "bf16", "fp16"]


class Job(Section):
    """Everything a run is made of. The resolved job is stored with the run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """What the run is called; the task's name if not given."""
    task: str = "classify"
    """A built-in task by name, or path/to/file.py:function."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the task function of a file."""
    data: DataSection = DataSection()
    model: dict[str, Any] = Field(default_factory=dict)
    """`name` of a built-in model, and its options."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip: ClipSection = ClipSection()

    batch_size: PositiveInt = 32
    """Samples per update, over all workers and micro-batches together."""
    accumulate: PositiveInt = 1
    """Micro-batches an update's batch is computed in, to save memory."""
    epochs: PositiveInt | None = None
    """Stop after this many passes over the data; 10 if no other end is set."""
    steps: PositiveInt | None = None
    """Stop after this many updates."""
    minutes: PositiveFloat | None = None
    """Stop after this much time."""

    precision: Precision = "fp32"
    recompute: bool = False
    """Activation checkpointing: keep less of the forward pass, compute it again in backward."""
    compile: bool = False
    """Compile the model with torch.compile."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, …"""
    threads: PositiveInt | None = None
    """Threads for one process's kernels; torch's own choice if not given."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    strategy: str = "single"
    workers: PositiveInt = 1
    """Processes that train together."""
    mesh: Mesh = Field(default_factory=dict)
    """How workers are arranged, `{data: 2, pipeline: 2}`; all along the strategy's own axis if
    not given."""
    sync: SyncSection = SyncSection()
    sharded: ShardedSection = ShardedSection()
    pipeline: PipelineSection = PipelineSection()
    tensor: TensorSection = TensorSection()
    parameter_server: ParameterServerSection = ParameterServerSection()
    elastic: ElasticSection = ElasticSection()

    evaluate: EvaluateSection = EvaluateSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    health: HealthSection = HealthSection()
    track: TrackSection = TrackSection()

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.epochs is None and self.steps is None and self.minutes is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.accumulate > self.batch_size:
            raise SettingError(
                f"accumulate ({self.accumulate}) splits a batch of {self.batch_size} samples: "
                f"it can be at most batch_size",
                "accumulate",
                "batch_size",
            )
        needs_total = self.schedule.name in ("linear", "cosine") and self.schedule.steps is None
        if needs_total and self.epochs is None and self.steps is None:
            raise SettingError(
                f"schedule {self.schedule.name!r} must know where it ends: "
                f"set schedule.steps, steps or epochs",
                *("schedule.name", "schedule.steps", "steps", "epochs", "minutes"),
            )
        if self.args and ":" not in self.task:
            raise SettingError(
                "args are for a task function (task: path/to/file.py:function)", "args", "task"
            )
        return self

    @model_validator(mode="after")
    def _mesh_sets_workers(self) -> Self:
        """Set `workers` to the size of the mesh; refuse another explicit number."""
        if not self.mesh:
            return self
        members = math.prod(self.mesh.values())
        if self.workers not in (1, members):
            raise SettingError(
                f"workers = {self.workers}, but the mesh has {members} places", "workers", "mesh"
            )
        object.__setattr__(self, "workers", members)
        return self

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if self.elastic.min_workers > self.workers:
            raise SettingError(
                f"elastic.min_workers = {self.elastic.min_workers}, but only {self.workers} "
                f"workers are started",
                "elastic.min_workers",
                "workers",
            )
        return self

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        quorum = self.parameter_server.quorum
        if isinstance(quorum, int) and quorum > self.workers:
            raise SettingError(
                f"parameter_server.quorum = {quorum}, but only {self.workers} workers are started",
                "parameter_server.quorum",
                "workers",
            )
        return self

    @model_validator(mode="after")
    def _compensates_before_clipping(self) -> Self:
        """Refuse delay compensation with clipping by norm if several gradients make an update.

        Clipping takes the norm of the sum before its parts are compensated, each for the weights
        that it was computed on.
        """
        servers = self.parameter_server
        several = isinstance(servers.quorum, int) and servers.quorum > 1
        if servers.compensate and self.clip.norm is not None and several:
            raise SettingError(
                f"parameter_server.compensate has no effect where clip.norm is set and "
                f"parameter_server.quorum = {servers.quorum}: use clip.value, or a quorum of 1",
                "parameter_server.compensate",
                "clip.norm",
                "parameter_server.quorum",
            )
        return self

    @model_validator(mode="after")
    def _evaluates_if_needed(self) -> Self:
        """Refuse settings that depend on validation results if there are no evaluations."""
        waiting = {
            "stop.patience": self.stop.patience is not None,
            "stop.target": self.stop.target is not None,
            "schedule.name": self.schedule.name == "plateau",
        }
        for key, waits in waiting.items():
            if waits and self.evaluate.every == "never":
                what = "schedule 'plateau'" if key == "schedule.name" else key
                raise SettingError(
                    f"{what} has no effect where evaluate.every is 'never'", key, "evaluate.every"
                )
        return self
