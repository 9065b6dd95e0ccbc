"""A data set, opened: its parts, and what was learnt from the training part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data.moments import Moments

HELD_OUT = 0.2
"""The part that is held out where the job does not say."""
_SPLIT_TAG = 0x5911
_MOMENT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Splits:
    """Two sources and the facts a task is built from."""

    train: BatchSource
    valid: BatchSource | None
    labels: tuple[str, ...]
    """Names of the classes; none for numbers and language models."""
    shape: tuple[int, ...]
    """Of one sample of the model's first input."""
    fitted: dict[str, Any]
    """Plain data: all that was learnt from the training part, enough to open new data alike."""
    about: dict[str, Any]
    """Facts for the report."""


def split_rows(
    rows: int, held_out: float | None, seed: int, classes: np.ndarray[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Training and held-out rows, in file order; of every class the same part is held out."""
    count = min(max(round(rows * (held_out or HELD_OUT)), 1), rows - 1)
    if rows < 2:
        raise DataError(f"{rows} record is too few to hold some out")
    drawn = np.random.default_rng([_SPLIT_TAG, seed]).random(rows)
    if classes is None:
        order = np.argsort(drawn, kind="stable")
    else:
        order = np.argsort(_quantiles(classes, drawn), kind="stable")
    held = np.zeros(rows, bool)
    held[order[:count]] = True
    numbers = torch.arange(rows)
    mask = torch.from_numpy(held)
    return numbers[~mask], numbers[mask]


def _quantiles(classes: np.ndarray[Any, Any], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where each record stands within its own class, from 0 to 1, in a random order."""
    order = np.lexsort((drawn, classes))
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(classes))
    sorted_classes = classes[order]
    place[order] = (np.arange(len(classes)) - starts[sorted_classes] + 0.5) / sizes[sorted_classes]
    return place


def fit_moments(source: BatchSource, column: str, shape: tuple[int, ...]) -> Moments:
    """Mean and deviation of a column, read in pieces of a few megabytes."""
    moments = Moments(shape)
    step = 1
    start = 0
    while start < len(source):
        rows = torch.arange(start, min(start + step, len(source)))
        values = source.gather(rows)[column]
        assert isinstance(values, Tensor)
        moments.add(values.numpy())
        start += len(rows)
        step = max(1, _MOMENT_BYTES * len(rows) // max(1, values.nbytes))
    return moments


def mean_and_std(moments: Moments) -> dict[str, list[float]]:
    """Plain data; a feature that never changes gets deviation 1, so that it can be divided by."""
    std = np.where(moments.max > moments.min, moments.std, 1.0)
    return {"mean": moments.mean.tolist(), "std": std.tolist()}
