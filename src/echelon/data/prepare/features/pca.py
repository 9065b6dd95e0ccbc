"""The few directions in which records differ most."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.features.numbers import Matrix, filled, one_thread
from echelon.data.prepare.features.rows import upright
from echelon.data.prepare.features.scale import Scaled
from echelon.data.prepare.learnt import Learnt

MOST = 4096
"""Columns at most: their covariances are a matrix of 128 MB."""


class PCA(Scaled):
    """Principal components, float32 [N, components], as scikit-learn's PCA by its full solver.

    The first look finds the means of train, the second adds up the products of what differs from
    them; a missing value is the mean.
    """

    components: Annotated[int, Field(ge=1)] | None = None
    """How many directions; or say `variance`."""
    variance: Annotated[float, Field(gt=0, lt=1)] | None = None
    """As many directions as hold at least this part of the variance."""
    whiten: bool = False
    """Bring every direction to variance 1."""

    passes: ClassVar[int] = 2

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.components is None) == (self.variance is None):
            raise SettingError("pca: say `components` or `variance`", "components", "variance")
        return self

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        if at == 0:
            return super().look(at, block, learnt)
        centred = self._centred(block, learnt)
        with one_thread():
            return {"rows": len(centred), "products": centred.T @ centred}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if at == 0:
            return self._means(super().learn(at, partials, learnt, scratch))
        rows, products = 0, np.zeros((len(learnt["mean"]),) * 2)
        for partial in partials:
            rows += partial["rows"]
            products += partial["products"]
        if rows < 2:
            raise DataError(f"feature {self.kind}: train has {rows} record: two are needed")
        with one_thread():
            variances, directions = np.linalg.eigh(products / (rows - 1))
        variances = np.maximum(variances[::-1], 0)
        kept = self._kept(variances, rows)
        return {
            "mean": learnt["mean"],
            "components": upright(directions.T[::-1][:kept]),
            "variances": variances[:kept].copy(),
            "parts": variances[:kept] / max(variances.sum(), np.finfo(float).tiny),
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        with one_thread():
            found = self._centred(block, learnt) @ learnt["components"].T
        if self.whiten:
            # A direction in which nothing differs stays 0.
            found /= np.sqrt(np.maximum(learnt["variances"], np.finfo(float).eps))
        return {self.name: found.astype(np.float32)}

    def _centred(self, block: Columns, learnt: Learnt) -> Matrix:
        values = filled(self.matrix(block), learnt["mean"])
        values -= learnt["mean"]
        return values

    def _means(self, figures: Learnt) -> Learnt:
        width = len(figures["mean"])
        if width > MOST:
            raise DataError(
                f"feature {self.kind}: {width} columns are more than {MOST}: use the kind `svd`"
            )
        if self.components is not None and self.components > width:
            raise DataError(f"feature {self.kind}: {self.components} components of {width} columns")
        return {"mean": figures["mean"]}

    def _kept(self, variances: NDArray[np.float64], rows: int) -> int:
        if self.components is not None:
            if self.components > rows:
                raise DataError(
                    f"feature {self.kind}: {self.components} components of {rows} records"
                )
            return self.components
        assert self.variance is not None
        parts = variances.cumsum() / max(variances.sum(), np.finfo(float).tiny)
        return min(int(np.searchsorted(parts, self.variance, "right")) + 1, len(variances))
