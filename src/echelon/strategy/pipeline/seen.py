"""What the last stage saw of the samples it is not to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.core.interfaces import Metric
from echelon.core.types import Batch


class Seen:
    """Sums of loss, weight and metrics; none of them where no last stage is."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.weight = 0.0
        self.totals: dict[str, Tensor] = {}

    def add(self, loss_sum: Tensor, weight: float, output: Any, batch: Batch) -> None:
        self.loss_sum += loss_sum.to("cpu", torch.float64).view(())
        self.weight += weight
        for name, metric in self._metrics.items():
            part = metric.measure(output, batch)
            self.totals[name] = self.totals[name] + part if name in self.totals else part
