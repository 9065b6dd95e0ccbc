"""What a run ended with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of `echelon.train`; `model` has the final weights.

    Of processes that torchrun started the first knows the run; in the others `run` is empty.
    """

    run: str
    status: str
    reason: str
    steps: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    best: dict[str, Any] | None
    folder: Path
    report: Path | None
    model: nn.Module
    nodes: dict[str, Any] = field(default_factory=dict)
    """Figures by trainer and by server, where there are servers."""

    def summary(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
        return {
            "run": self.run,
            "status": self.status,
            "reason": self.reason,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "metrics": {name: _plain(value) for name, value in self.metrics.items()},
            "best": self.best,
            "folder": str(self.folder),
            "report": str(self.report) if self.report else None,
            **({"nodes": self.nodes} if self.nodes else {}),
        }


def _plain(value: float) -> float | None:
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else None
