"""Metrics computed from sums: the total over all batches and members gives the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.core.interfaces import Loss, Metric
from echelon.core.types import Batch
from echelon.task.losses import IGNORED, logits


def as_metrics(metrics: Mapping[str, Metric | Loss]) -> dict[str, Metric]:
    """Return metrics by name, with functions that return (sum, weight) wrapped in `Mean`."""
    return {
        name: metric if isinstance(metric, Metric) else Mean(metric)
        for name, metric in metrics.items()
    }


class Mean:
    """Σ sum / Σ weight of a function like a loss."""

    def __init__(self, function: Loss) -> None:
        self._function = function

    def measure(self, output: Any, batch: Batch) -> Tensor:
        total, weight = self._function(output, batch)
        return torch.stack([total.detach().double(), _count(weight, total)])

    def value(self, total: Tensor) -> float:
        return float(total[0] / total[1])


class Accuracy:
    """Fraction of samples whose target has the highest score, or one of the `top` highest.

    Targets of -100 do not count.
    """

    def __init__(self, top: int = 1) -> None:
        self._top = top

    def measure(self, output: Any, batch: Batch) -> Tensor:
        scores, y = logits(output), _target(batch)
        if self._top == 1:
            right = scores.argmax(-1) == y
        else:
            right = (scores.topk(self._top, -1).indices == y.unsqueeze(-1)).any(-1)
        return torch.stack([right.sum().double(), (y != IGNORED).sum().double()])

    def value(self, total: Tensor) -> float:
        return float(total[0] / total[1])


class Confusion:
    """Counts of (target, predicted) classes; the value is the macro-averaged F1.

    Targets of -100 do not count.
    """

    is_confusion = True

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def measure(self, output: Any, batch: Batch) -> Tensor:
        y, size = _target(batch).reshape(-1), self.classes**2
        predicted = logits(output).argmax(-1).reshape(-1)
        cells = torch.where(y == IGNORED, size, y * self.classes + predicted)
        counts = torch.bincount(cells, minlength=size + 1)[:size]
        return counts.view(self.classes, self.classes).double()

    def value(self, total: Tensor) -> float:
        hits = total.diagonal()
        f1 = 2 * hits / (total.sum(0) + total.sum(1)).clamp(min=1)
        return float(f1.mean())


class AUC:
    """Area under the ROC curve, from histograms of the scores: exact to about 1 / bins."""

    def __init__(self, bins: int = 16_384) -> None:
        self._bins = bins

    def measure(self, output: Any, batch: Batch) -> Tensor:
        chance = logits(output).reshape(-1).double().sigmoid()
        bins = (chance * self._bins).long().clamp(max=self._bins - 1)
        positive = (_target(batch).reshape(-1) > 0.5).long()
        counts = torch.bincount(bins * 2 + positive, minlength=self._bins * 2)
        return counts.view(self._bins, 2).double()

    def value(self, total: Tensor) -> float:
        negative, positive = total[:, 0], total[:, 1]
        below = negative.cumsum(0) - negative
        pairs = negative.sum() * positive.sum()
        won = (positive * (below + negative / 2)).sum()
        return float(won / pairs) if pairs > 0 else math.nan


class Hits:
    """Accuracy of a yes/no decision: the fraction of samples whose score has the right sign."""

    def measure(self, output: Any, batch: Batch) -> Tensor:
        y = _target(batch).reshape(-1)
        right = (logits(output).reshape(-1) > 0) == (y > 0.5)
        return torch.stack([right.sum().double(), _count(y.numel(), right)])

    def value(self, total: Tensor) -> float:
        return float(total[0] / total[1])


class _Residuals:
    """Sums from which RMSE and R² are computed: squared error, targets, their squares, count."""

    def measure(self, output: Any, batch: Batch) -> Tensor:
        y = _target(batch).double().reshape(-1)
        error = logits(output).double().reshape(-1) - y
        sums = [error.square().sum(), y.sum(), y.square().sum()]
        return torch.stack([*sums, _count(y.numel(), error)])


class RMSE(_Residuals):
    """Root of the mean squared error."""

    def value(self, total: Tensor) -> float:
        return float((total[0] / total[3]).sqrt())


class R2(_Residuals):
    """Coefficient of determination: the fraction of the targets' variance that is explained."""

    def value(self, total: Tensor) -> float:
        squares, y_sum, y_squares, count = total
        spread = y_squares - y_sum.square() / count
        return float(1 - squares / spread) if spread > 0 else math.nan


def _target(batch: Batch) -> Tensor:
    column = batch["y"]
    assert isinstance(column, Tensor), "targets are dense"
    return column


def _count(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a number on the device of `like`, without a copy that would wait for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(like.device, torch.double)
    return like.new_full((), value, dtype=torch.double, requires_grad=False)
