"""When a validation figure is good enough, or gets no better."""

from __future__ import annotations

import math
from typing import Any, Literal

from echelon.core.errors import CheckpointError

Mode = Literal["min", "max"]
SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "perplexity")  # rmse has mse in it


def stop_mode(mode: Literal["auto", "min", "max"], metric: str) -> Mode:
    """Whether smaller or larger is better; `auto` tells by the metric's name."""
    if mode != "auto":
        return mode
    return "min" if any(word in metric.lower() for word in SMALLER_IS_BETTER) else "max"


class EarlyStop:
    """Hears one figure per evaluation and says when to stop, and why."""

    def __init__(
        self,
        mode: Mode,
        patience: int | None = None,
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.target = target
        self.best: float | None = None
        self.should_stop: str | None = None
        self._waited = 0

    def observe(self, value: float) -> bool:
        """Whether this is the best so far, by more than `min_delta`. NaN never is."""
        better = self._is_better(value)
        if better:
            self.best = value
        self._waited = 0 if better else self._waited + 1
        self.should_stop = self.should_stop or self._reason(value)
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self._waited, "should_stop": self.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(f"early stopping cannot go on from {sorted(state)}")
        self.best, self._waited = state["best"], state["waited"]
        self.should_stop = state["should_stop"]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _reason(self, value: float) -> str | None:
        if self.target is not None and self._reaches(value, self.target):
            return f"target reached: {value:.6g} (target {self.target:.6g})"
        if self.patience is not None and self._waited >= self.patience:
            best = "no finite value" if self.best is None else f"best {self.best:.6g}"
            return f"no improvement in {self._waited} evaluations ({best})"
        return None

    def _reaches(self, value: float, target: float) -> bool:
        return value <= target if self.mode == "min" else value >= target
