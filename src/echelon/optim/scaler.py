"""Loss scaling for fp16, whose smallest gradients would otherwise round to nothing."""

from __future__ import annotations

from typing import Any

from echelon.core.errors import CheckpointError

START = 2.0**16
LARGEST = 2.0**24
SMALLEST = 1.0
GROWTH_EVERY = 2000


class LossScaler:
    """The factor a loss is multiplied by before backward, and its gradients divided by after.

    It doubles after 2000 good steps in a row and halves on an overflow. Only fp16 needs it: for
    every other precision the scale is 1 for good.
    """

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.scale = START if self.enabled else 1.0
        self.exhausted = False
        """Gradients overflow even unscaled: it is not the scale that is wrong."""
        self._good = 0

    def update(self, finite: bool) -> None:
        """Hear whether the step's gradients were finite."""
        if not self.enabled:
            return
        if not finite:
            self.exhausted = self.scale <= SMALLEST
            self.scale = max(SMALLEST, self.scale / 2)
            self._good = 0
            return
        self.exhausted = False
        self._good += 1
        if self._good == GROWTH_EVERY:
            self.scale = min(LARGEST, self.scale * 2)
            self._good = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(
                "the saved loss scale does not fit: only runs in fp16 have one, and all of them"
            )
        if self.enabled:
            self.scale, self._good = float(state["scale"]), int(state["good"])
            self.exhausted = False
