"""Many columns as few, straight from sparse rows: what latent semantic analysis does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.features.numbers import named, one_thread
from echelon.data.prepare.features.rows import Rows, rows, upright
from echelon.data.prepare.learnt import Learnt

_TAG = 0x57D


class SVD(Feature):
    """Rows times the `components` largest right singular vectors of train, float32.

    Randomised subspace iteration (Halko, Martinsson and Tropp): some more directions than are
    wanted, drawn by `seed`, are multiplied by XᵀX and made orthogonal again, once per look; a last
    look finds the singular vectors among them. As scikit-learn's TruncatedSVD: what is left is the
    smaller, the faster singular values fall and the more `iterations` there are. Missing values
    are 0.
    """

    components: Annotated[int, Field(ge=1)] = 100
    iterations: Annotated[int, Field(ge=1, le=100)] = 4
    more: Annotated[int, Field(ge=0)] = 10
    """Directions that are carried along and dropped in the end."""
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
