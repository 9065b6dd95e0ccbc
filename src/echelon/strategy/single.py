"""One process, one model: the trajectory every synchronous strategy has to end on."""

from __future__ import annotations

import math

from echelon.core.errors import TaskError
from echelon.optim import gradients
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous
from echelon.strategy.tables import RowUpdates


class Single(Synchronous):
    """Nobody to meet."""

    alone = True

    def _open_rows(self) -> RowUpdates:
        return RowUpdates(self.model)

    def _meet(self) -> Met:
        grads, weight = self._grads(), self._weight
        if not grads:
            raise TaskError(NO_GRADIENT)
        finite = 0 < weight < math.inf and gradients.finish_(grads, weight * self._scaler.scale)
        return Met(self._loss_sum.item(), weight, finite, int(self._comm.asked))
