"""Look at the held-out samples, each exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.core.config import Job
from echelon.core.errors import TrainingError
from echelon.core.interfaces import Metric, Strategy
from echelon.core.types import Stats
from echelon.data.loader import Loader, ranges


class Evaluation(NamedTuple):
    """Figures, and the sums they were computed from."""

    values: dict[str, float]
    totals: dict[str, Tensor]
    samples: int


def evaluation_size(job: Job) -> int:
    """Samples looked at together: no gradients are kept, so there is room for more."""
    return job.evaluate.batch_size or max(job.batch_size, 256)


def evaluate(
    strategy: Strategy, loader: Loader, metrics: Mapping[str, Metric], batch_size: int
) -> Evaluation:
    """Loss and metrics over everything the loader has; members look at a part each."""
    loss_sum, weight = 0.0, 0.0
    totals: dict[str, Tensor] = {}
    with closing(loader.stream(ranges(len(loader.source), batch_size))) as stream:
        for _lease, micro in stream:
            stats = strategy.compute(micro, backward=False)
            loss_sum += float(stats.loss_sum)
            weight += stats.weight
            for name, part in stats.metrics.items():
                totals[name] = totals[name] + part if name in totals else part
    seen = strategy.total(Stats(torch.tensor(loss_sum, dtype=torch.float64), weight, totals))
    if seen.weight == 0:
        raise TrainingError("the held-out samples have no weight: there is nothing to evaluate")
    values = {"loss": float(seen.loss_sum) / seen.weight}
    values |= {name: metrics[name].value(total) for name, total in seen.metrics.items()}
    return Evaluation(values, dict(seen.metrics), len(loader.source))
