"""Features that reduce many columns to few: principal components and truncated SVD.

Neither holds the data. PCA adds up a covariance matrix [D, D], so it is limited to dense columns;
SVD multiplies with a few random directions, pass by pass, and takes sparse rows of any width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.features.numbers import Matrix, Scaled, filled, matrix, named
from echelon.data.prepare.steps import Columns, Feature, Sparse, Values, one_thread
from echelon.data.prepare.workdir import Learnt

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class PCA(Scaled):
    """Principal components, float32 [N, components], like scikit-learn's PCA with its full solver.

    The first pass finds the means of train, the second adds up the products of the deviations from
    them. A missing value counts as the mean.
    """

    components: Annotated[int, Field(ge=1)] | None = None
    """The number of components; or set `variance`."""
    variance: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Take as many components as explain at least this share of the variance."""
    whiten: bool = False
    """Scale every component to variance 1."""

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
            # A component of zero variance stays 0.
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


MOST = 4096
"""Columns that PCA takes at most: their covariances are a matrix of 128 MB."""


class SVD(Feature):
    """Rows times the `components` leading right singular vectors of train, float32.

    On rows of tf-idf this is latent semantic analysis. Randomized subspace iteration (Halko,
    Martinsson and Tropp): `components` + `more` random directions are multiplied by XᵀX and made
    orthogonal again, once per pass; a last pass finds the singular vectors in their span. As in
    scikit-learn's TruncatedSVD, the error falls with more `iterations` and with faster decay of the
    singular values. Missing values count as 0.
    """

    components: Annotated[int, Field(ge=1)] = 100
    iterations: Annotated[int, Field(ge=1, le=100)] = 4
    more: Annotated[int, Field(ge=0)] = 10
    """Additional directions for accuracy, dropped in the end (scikit-learn: n_oversamples)."""
    seed: int = 0

    @property
    def looks(self) -> int:
        return self.iterations + 1

    def check(self, names: Any) -> None:
        super().check(names)
        named(self)

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        x = self._rows(block)
        basis = learnt["basis"] if at else self._drawn(x.shape[1])
        with one_thread():
            seen = x @ basis
            if at < self.iterations:
                return {"products": x.T @ seen}
            return {"products": seen.T @ seen, "squares": float((x * x).sum())}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        products: Any = None
        squares = 0.0
        for partial in partials:
            products = partial["products"] if products is None else products + partial["products"]
            squares += partial.get("squares", 0.0)
        if products is None or not products.any():
            raise DataError(f"feature {self.kind}: train has nothing but zeros")
        with one_thread():
            if at < self.iterations:
                return {"basis": np.linalg.qr(products)[0]}
            return self._found(products, learnt["basis"], squares)

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        with one_thread():
            found = self._rows(block) @ learnt["components"].T
        return {self.name: found.astype(np.float32)}

    def _rows(self, block: Columns) -> Rows:
        return rows(self.kind, block, self.sources)

    def _drawn(self, width: int) -> NDArray[np.float64]:
        if self.components > width:
            raise DataError(f"feature {self.kind}: {self.components} components of {width} columns")
        size = min(self.components + self.more, width)
        return np.random.default_rng([_TAG, abs(self.seed)]).standard_normal((width, size))

    def _found(
        self, products: NDArray[np.float64], basis: NDArray[np.float64], squares: float
    ) -> Learnt:
        values, directions = np.linalg.eigh(products)
        kept = directions[:, ::-1][:, : self.components]
        largest = np.maximum(values[::-1][: self.components], 0)
        return {
            "components": upright((basis @ kept).T),
            "values": np.sqrt(largest),
            "parts": largest / max(squares, np.finfo(float).tiny),
        }


_TAG = 0x57D
Rows: TypeAlias = "Matrix | csr_array"


def rows(kind: str, block: Columns, names: list[str]) -> Rows:
    """Return float64 rows: sparse for a single sparse column, else dense with missing values 0."""
    first = block[names[0]]
    if len(names) == 1 and isinstance(first, Sparse):
        return compressed(first)
    dense = matrix(kind, block, names)
    dense[np.isnan(dense)] = 0
    return dense


def compressed(sparse: Sparse) -> csr_array:
    """Return the rows as a scipy matrix."""
    from scipy.sparse import csr_array

    shape = (len(sparse.offsets) - 1, sparse.width)
    values = sparse.values.astype(np.float64)
    return csr_array((values, sparse.indices, sparse.offsets), shape)


def upright(components: NDArray[np.float64]) -> NDArray[np.float64]:
    """Flip directions [K, D] so that their largest entry is positive, as scikit-learn does.

    Without this, their sign would depend on the BLAS library.
    """
    largest = np.abs(components).argmax(1)
    signs: Any = np.sign(components[np.arange(len(components)), largest])
    out: NDArray[np.float64] = components * np.where(signs == 0, 1, signs)[:, None]
    return out
