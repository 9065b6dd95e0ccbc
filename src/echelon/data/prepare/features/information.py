"""Mutual information of columns and labels, from tables of how often they occur together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.columns import Sparse

Table = NDArray[np.int64]


def contingency(values: Table, labels: Table, bins: int, kinds: int) -> Table:
    """[D, bins, kinds]: how often each bin of each column of [N, D] occurs with each label."""
    columns = [np.bincount(column * kinds + labels, minlength=bins * kinds) for column in values.T]
    return np.stack(columns).reshape(-1, bins, kinds)


def information(table: Table) -> NDArray[np.float64]:
    """In nats, of each column [D]."""
    whole = table.sum((1, 2), keepdims=True)
    expected = table.sum(2, keepdims=True) * (table.sum(1, keepdims=True) / np.maximum(whole, 1))
    ratio = np.divide(table, expected, out=np.ones_like(expected), where=table > 0)
    found = (table * np.log(ratio)).sum((1, 2)) / np.maximum(whole[:, 0, 0], 1)
    return np.asarray(np.maximum(found, 0), np.float64)


def presence(rows: Sparse, labels: Table, kinds: int) -> dict[str, Any]:
    """How often each column of sparse rows is not 0 with each label, and each label occurs."""
    there = np.repeat(labels, np.diff(rows.offsets))
    entry = (rows.values != 0) & (there >= 0)
    flat = np.bincount(
        rows.indices[entry].astype(np.int64) * kinds + there[entry], minlength=rows.width * kinds
    )
    counts = np.bincount(labels[labels >= 0], minlength=kinds)
    return {"table": flat.reshape(rows.width, kinds), "counts": counts}


def presence_information(table: Table, counts: Table) -> NDArray[np.float64]:
    """In nats, of each column [D]."""
    return information(np.stack([table, counts - table], 1))
