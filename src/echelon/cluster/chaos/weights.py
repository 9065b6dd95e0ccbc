"""How far two runs of one job are apart in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from echelon import strategy
from echelon.checkpoint import Shelf
from echelon.core.config import Job
from echelon.loop.assemble import CHECKPOINTS
from echelon.loop.inference import final_model
from echelon.task import load_task

ALIKE = 1e-4
"""The largest difference of a weight that rounding may make."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two final checkpoints."""

    largest: float
    unlike: str | None
    """Why the two may differ by more than rounding; None if they may not."""
    tolerance: float = ALIKE

    @property
    def is_alike(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def problem(self) -> str | None:
        """What should not be."""
        if self.is_alike or self.unlike is not None:
            return None
        return f"a weight differs by {self.largest:.1e}, which is more than {self.tolerance:g}"


def difference(job: Job, one: Path, other: Path, tolerance: float = ALIKE) -> Difference:
    """Of the weights after the last update."""
    cuts = [Shelf(folder / CHECKPOINTS).load("last") for folder in (one, other)]
    first, second = (cut["strategy"]["model"] for cut in cuts)
    # What is not a number is neither larger nor smaller than others, and might get lost.
    largest = max(_apart(first, second), default=0.0, key=lambda x: math.inf if x != x else x)
    return Difference(largest, _unlike(job, one, cuts), tolerance)


def _apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[float]:
    for name, values in first.items():
        if values.numel():
            yield float((values.double() - second[name].double()).abs().max())


def in_any_order(job: Job) -> bool:
    """Whether updates are made as trainers come: then no two runs make the same ones."""
    return strategy.has_servers(job) and not job.parameter_server.together


def _unlike(job: Job, folder: Path, cuts: list[dict[str, Any]]) -> str | None:
    if in_any_order(job):
        return "trainers made updates in another order"
    versions = [cut["strategy"]["version"] for cut in cuts]
    if len(set(versions)) > 1:
        return f"they made {versions[0]:,} and {versions[1]:,} updates"
    modules = list(final_model(job, load_task(job), folder).modules())
    if any(isinstance(module, _DropoutNd) and module.p for module in modules):
        return "dropout draws anew for other members"
    own = job.sync.batch_norm == "local"
    if own and any(isinstance(module, _BatchNorm) for module in modules):
        return "batch norm's statistics are of each member's own samples"
    return None
