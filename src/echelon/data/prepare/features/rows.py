"""Rows of a matrix, dense or sparse, whatever columns they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.columns import Columns, Sparse
from echelon.data.prepare.features.numbers import Matrix, matrix

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Rows: TypeAlias = "Matrix | csr_array"


def rows(kind: str, block: Columns, names: list[str]) -> Rows:
    """float64; a single sparse column stays so, and of others a missing value is 0."""
    first = block[names[0]]
    if len(names) == 1 and isinstance(first, Sparse):
        return compressed(first)
    dense = matrix(kind, block, names)
    dense[np.isnan(dense)] = 0
    return dense


def compressed(sparse: Sparse) -> csr_array:
    """The same rows as scipy has them."""
    from scipy.sparse import csr_array

    shape = (len(sparse.offsets) - 1, sparse.width)
    values = sparse.values.astype(np.float64)
    return csr_array((values, sparse.indices, sparse.offsets), shape)


def upright(components: NDArray[np.float64]) -> NDArray[np.float64]:
    """Directions [K, D] whose largest entry is positive: their sign is otherwise a matter of luck.

    As scikit-learn has them.
    """
    largest = np.abs(components).argmax(1)
    signs: Any = np.sign(components[np.arange(len(components)), largest])
    out: NDArray[np.float64] = components * np.where(signs == 0, 1, signs)[:, None]
    return out
