"""Numbers of mean 0 and deviation 1."""

from __future__ import annotations

from typing import Literal

import numpy as np

from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.features.numbers import filled
from echelon.data.prepare.features.scale import Scaled, not_zero
from echelon.data.prepare.learnt import Learnt


class Standardise(Scaled):
    """(x − mean) ÷ deviation, by figures of train; float32. As scikit-learn's StandardScaler."""

    missing: Literal["mean", "keep"] = "mean"
    """Missing values become 0, which is the mean; or stay missing (NaN)."""

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        values = self.matrix(block)
        if self.missing == "mean":
            values = filled(values, learnt["mean"])
        values -= learnt["mean"]
        values /= not_zero(learnt["std"], learnt)
        return self.made(block, values.astype(np.float32, order="C"))
