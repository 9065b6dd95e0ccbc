"""Optimizers, learning-rate schedules, gradients, loss scaling and early stopping."""

from echelon.optim.build import build as build_optimizer
from echelon.optim.build import spare_compiler
from echelon.optim.gradients import (
    clip_norm_,
    clip_value_,
    finish_,
    first_non_finite,
    global_norm,
    layer_norms,
)
from echelon.optim.schedules import EarlyStop, stop_mode
from echelon.optim.schedules import build as build_schedule
from echelon.optim.step import LossScaler, Stepper

__all__ = [
    "EarlyStop",
    "LossScaler",
    "Stepper",
    "build_optimizer",
    "build_schedule",
    "clip_norm_",
    "clip_value_",
    "finish_",
    "first_non_finite",
    "global_norm",
    "layer_norms",
    "spare_compiler",
    "stop_mode",
]
