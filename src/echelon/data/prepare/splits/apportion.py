"""Shares of whole numbers, so that neither a class nor the sum of all is far off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def apportion(sizes: NDArray[np.int64], shares: Sequence[float]) -> NDArray[np.int64]:
    """How many records of each class [C] each split gets: int64 [C, splits].

    A class is divided within one record of its shares. What is left over by rounding down goes to
    the split that lacks most in sum so far, so that many small classes do not all favour the same
    one. Every class has at least one record in the first split, if that has a share.
    """
    exact = sizes[:, None] * np.asarray(shares, np.float64) / sum(shares)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    parts = exact - counts
    spare = sizes - counts.sum(1)
    lack = np.zeros(len(shares))
    for number in np.flatnonzero(spare):
        lack += parts[number]
        # A share that divides evenly gets no more: it would be a whole record off.
        order = np.argsort(-np.where(parts[number] > 1e-9, lack, -np.inf), kind="stable")
        chosen = order[: spare[number]]
        counts[number, chosen] += 1
        lack[chosen] -= 1
    if shares[0] > 0:
        _at_least_one(counts, exact)
    return counts


def _at_least_one(counts: NDArray[np.int64], exact: NDArray[np.float64]) -> None:
    absent = np.flatnonzero((counts[:, 0] == 0) & (exact[:, 0] > 0))
    # From whoever was rounded up: so all stay within one record of their shares.
    giver = (counts[absent] - exact[absent]).argmax(1)
    counts[absent, giver] -= 1
    counts[absent, 0] += 1
