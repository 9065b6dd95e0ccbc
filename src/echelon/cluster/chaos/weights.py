"""How far two runs of one job are apart in the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

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

    @property
    def is_alike(self) -> bool:
        return self.largest <= ALIKE


def difference(job: Job, one: Path, other: Path) -> Difference:
    """Of the weights after the last update."""
    cuts = [Shelf(folder / CHECKPOINTS).load("last") for folder in (one, other)]
    first, second = (cut["strategy"]["model"] for cut in cuts)
    largest = max(
        (float((first[name].double() - second[name].double()).abs().max()) for name in first),
        default=0.0,
    )
    return Difference(largest, _unlike(job, one, cuts))


def _unlike(job: Job, folder: Path, cuts: list[dict[str, Any]]) -> str | None:
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
