"""What happens beside the updates: evaluation, stopping, checkpoints, health, tracking."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from echelon.core.config.base import Section, SettingError

Every = Literal["epoch", "never"] | Annotated[int, Field(gt=0)]


class EvaluateSection(Section):
    """When and how the held-out part is looked at."""

    every: Every = "epoch"
    """`epoch`, a number of steps, or `never`."""
    batch_size: PositiveInt | None = None
    """The training batch size, but at least 256, if not given."""


class StopSection(Section):
    """Ends a run before its last epoch."""

    metric: str = "loss"
    """A validation figure: `loss` or one of the task's metrics."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller or larger is better; `auto`: smaller for a loss or an error."""
    target: float | None = None
    """Stop when the metric is this good."""
    patience: PositiveInt | None = None
    """Early stopping: evaluations without improvement before the run ends."""
    min_delta: NonNegativeFloat = 0.0
    """What counts as an improvement."""


class CheckpointSection(Section):
    """Cuts to come back to."""

    every: Every = "epoch"
    """`epoch`, a number of steps, or `never` (only at the end)."""
    keep: PositiveInt = 2
    """How many of the latest are kept, beside the best."""
    best: bool = True
    """Keep the one with the best `stop.metric` too."""


class HealthSection(Section):
    """Watches over gradients."""

    every: PositiveInt = 100
    """Steps between two looks at each layer's gradient."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do with a non-finite update; it is never applied."""
    vanishing: NonNegativeFloat = 1e-7
    """Warn when a layer's gradient norm is below this part of the largest layer's."""
    exploding: NonNegativeFloat = 1e3
    """Warn when a layer's gradient norm is above this multiple of its weight's norm."""


class TrackSection(Section):
    """Where the run is recorded and what is told."""

    folder: str = "runs"
    """Holds one folder per run and the store of all runs."""
    every: PositiveInt = 50
    """Steps between two recorded points."""
    exporters: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """Where the figures go besides."""
    report: bool = True
    """Write an HTML report at the end."""

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        if len(set(self.exporters)) != len(self.exporters):
            raise SettingError(
                f"track.exporters names one twice: {list(self.exporters)}", "exporters"
            )
        return self
