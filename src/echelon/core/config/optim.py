"""Optimizer, learning-rate schedule and clipping."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from echelon.core.config.base import Section, SettingError

OptimizerName = Literal["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"]
ScheduleName = Literal["constant", "step", "cosine", "linear", "plateau"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The update rule."""

    name: OptimizerName = "adamw"
    lr: PositiveFloat = 1e-3
    momentum: Beta | None = None
    """For momentum, nesterov (0.9 if not given) and rmsprop (0 if not given)."""
    betas: tuple[Beta, Beta] | None = None
    """For adam and adamw; (0.9, 0.999) if not given."""
    eps: PositiveFloat | None = None
    l1: NonNegativeFloat = 0.0
    """Adds l1·sign(w) to the gradient."""
    l2: NonNegativeFloat = 0.0
    """Adds l2·w to the gradient."""
    weight_decay: NonNegativeFloat = 0.0
    """Shrinks w by lr·weight_decay·w beside the gradient step (decoupled, as in AdamW)."""
    decay: Literal["matrices", "all"] = "matrices"
    """What l1, l2 and weight_decay act on: all but biases and norms, or everything."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        idle = {
            "momentum": self.name not in ("momentum", "nesterov", "rmsprop"),
            "betas": self.name not in ("adam", "adamw"),
            "eps": self.name in ("sgd", "momentum", "nesterov"),
        }
        _refuse_idle(self, "optimizer", idle)
        return self


class ScheduleSection(Section):
    """How the learning rate changes over the run."""

    name: ScheduleName = "constant"
    warmup: NonNegativeInt = 0
    """Steps over which the rate rises from nothing to its full value."""
    steps: PositiveInt | None = None
    """Where linear and cosine end; the end of the run if not given."""
    every: PositiveInt | None = None
    """For step: multiply by `factor` every so many steps."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """For step and plateau."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The smallest factor of the learning rate."""
    patience: PositiveInt = 3
    """For plateau: evaluations without improvement before the rate falls."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.name == "step" and self.every is None:
            raise SettingError(
                "schedule 'step' needs schedule.every (steps between two drops)", "name", "every"
            )
        idle = {
            "every": self.name != "step",
            "steps": self.name not in ("linear", "cosine"),
            "factor": self.name not in ("step", "plateau"),
            "floor": self.name == "constant",
            "patience": self.name != "plateau",
        }
        _refuse_idle(self, "schedule", idle)
        return self


class ClipSection(Section):
    """Keep gradients small, by global norm or value by value."""

    norm: PositiveFloat | None = None
    value: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.norm is not None and self.value is not None:
            raise SettingError("clip has both a norm and a value: keep one", "value", "norm")
        return self


def _refuse_idle(
    section: OptimizerSection | ScheduleSection, at: str, idle: dict[str, bool]
) -> None:
    """A setting that is not as usual but does nothing under this name is a mistake."""
    for key, has_no_effect in idle.items():
        usual = type(section).model_fields[key].default
        if has_no_effect and getattr(section, key) != usual:
            raise SettingError(f"{at}.{key} has no effect on {section.name!r}", key, "name")
