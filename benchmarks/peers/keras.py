"""Keras on TensorFlow: `compile` and `fit` with their defaults (progress bar on, XLA)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .clock import Clock
from .work import DECAY, LR, SEED, Work

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf  # type: ignore[import-untyped]

from . import keras_models

tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
tf.config.threading.set_inter_op_parallelism_threads(torch.get_num_threads())
MODELS: dict[str, Callable[[int], Any]] = {
    "mlp": keras_models.mlp,
    "mlp_long": keras_models.mlp,
    "cnn": keras_models.cnn,
    "gpt": keras_models.gpt,
}


def train(work: Work, clock: Clock) -> float:
    keras.utils.set_random_seed(SEED)
    model = MODELS[work.name](work.classes)
    theirs, ours = model.count_params(), sum(p.numel() for p in work.model().parameters())
    assert theirs == ours, f"{work.name}: Keras has {theirs} parameters, torch {ours}"
    model.compile(
        optimizer=keras.optimizers.AdamW(LR, weight_decay=DECAY, epsilon=1e-8),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    _tell(model, clock)
    x, y = _arrays(work.x, work.y)
    model.fit(x, y, batch_size=work.batch_size, epochs=clock.total)
    return float(model.evaluate(*_arrays(*work.probe()), verbose=0))


def _arrays(x: torch.Tensor, y: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Images with their channels last, classes as int32."""
    if x.ndim == 4:
        x = x.permute(0, 2, 3, 1).contiguous()
    elif not x.is_floating_point():
        x = x.int()
    return x.numpy(), y.int().numpy()


def _tell(model: Any, clock: Clock) -> None:
    """Tick at each step's begin, without the callback that would slow Keras down."""
    model.make_train_function()
    inner = model.train_function

    def step(iterator: Any) -> Any:
        if clock.tick():
            model.stop_training = True
        return inner(iterator)

    model.train_function = step
