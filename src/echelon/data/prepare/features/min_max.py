"""Numbers brought into a range."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from echelon.core.config.sections import SettingError
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.features.numbers import filled
from echelon.data.prepare.features.scale import Scaled, not_zero
from echelon.data.prepare.learnt import Learnt


class MinMax(Scaled):
    """The least value of train to the low end, the greatest to the high end; float32.

    As scikit-learn's MinMaxScaler.
    """

    low: float = 0.0
    high: float = 1.0
    clip: bool = False
    """Values beyond those of train become the ends; else they lie outside of the range."""
    missing: Literal["mean", "keep"] = "mean"
    """Missing values become the mean of train, scaled; or stay missing (NaN)."""

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.low >= self.high:
            raise SettingError(f"low = {self.low:g} must be below high = {self.high:g}", "low")
        return self

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        values = self.matrix(block)
        if self.missing == "mean":
            values = filled(values, learnt["mean"])
        values -= learnt["min"]
        values *= (self.high - self.low) / not_zero(learnt["max"] - learnt["min"], learnt)
        values += self.low
        if self.clip:
            np.clip(values, self.low, self.high, out=values)
        return self.made(block, values.astype(np.float32, order="C"))
