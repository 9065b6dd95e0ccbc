"""What scaling numbers needs to know: their moments, gathered block by block."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.moments import Moments
from echelon.data.prepare.columns import Columns
from echelon.data.prepare.features.numbers import NumberFeature
from echelon.data.prepare.learnt import Learnt


class Scaled(NumberFeature):
    """Learns count, mean, deviation, minimum and maximum of each column of train.

    Blocks are merged as (count, mean, sum of squared deviations), in their order.
    """

    passes: ClassVar[int] = 1

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        values = self.matrix(block)
        moments = Moments((values.shape[1],))
        moments.add(values)
        return {"moments": moments.state()}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        moments: Moments | None = None
        for partial in partials:
            moments = moments or Moments(partial["moments"].shape[1:])
            moments.merge(partial["moments"])
        if moments is None or not moments.count.all():
            raise DataError(
                f"feature {self.kind}: {self._empty(moments)} has no number in any record of train"
            )
        return {
            "count": moments.count.astype(np.int64),
            "mean": moments.mean,
            "std": moments.std,
            "min": moments.min,
            "max": moments.max,
        }

    def _empty(self, moments: Moments | None) -> str:
        whole = moments is None or len(moments.count) != len(self.sources)
        name = "" if whole else self.sources[int(moments.count.argmin())]  # type: ignore[union-attr]
        return f"column {name!r}" if name else f"one of {', '.join(self.sources)}"


def not_zero(scale: NDArray[np.float64], learnt: Learnt) -> NDArray[np.float64]:
    """1 for a column that never changes, so that it can be divided by."""
    return np.where(learnt["max"] > learnt["min"], scale, 1.0)
