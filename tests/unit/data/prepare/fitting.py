"""Fit and apply features in one process as the engine does: blocks, passes, partial results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from echelon.core.config.loading import checked
from echelon.data.prepare.recipe import feature_kind
from echelon.data.prepare.steps import Columns, Feature, Sparse, rows, take_all
from echelon.data.prepare.workdir import Learnt, pack, unpack

SCRATCH = Path("scratch")


def feature(kind: str, source: str | list[str], to: str = "out", **settings: Any) -> Feature:
    """Return a feature as a row of a recipe would make it."""
    return checked(feature_kind(kind), {"kind": kind, "from": source, "to": to, **settings})


def named(matrix: Any) -> dict[str, Any]:
    """Return the columns of a matrix by name, as a table has them."""
    return {
        f"c{at}": pa.array(np.ascontiguousarray(c)) for at, c in enumerate(np.asarray(matrix).T)
    }


def blocks(columns: Columns, size: int) -> list[Columns]:
    """Cut all rows into blocks of `size`."""
    count = rows(next(iter(columns.values())))
    cuts = [np.arange(low, min(low + size, count)) for low in range(0, count, size)]
    return [take_all(columns, cut) for cut in cuts]


def learn(made: Feature, columns: Columns, size: int = 100) -> Learnt:
    """Return what a feature learns; partial results are packed as between processes."""
    types = {name: getattr(values, "type", pa.null()) for name, values in columns.items()}
    made.check(types)
    learnt: Learnt = {}
    for at in range(made.looks):
        partials = (unpack(pack(made.look(at, b, learnt))) for b in blocks(columns, size))
        learnt = unpack(pack(made.learn(at, partials, learnt, SCRATCH)))
    return learnt


def encode(made: Feature, columns: Columns, learnt: Learnt, size: int = 70) -> Any:
    """Return the one column that a feature makes of all rows, block by block."""
    parts = [made.encode(block, learnt)[made.name] for block in blocks(columns, size)]
    if isinstance(parts[0], Sparse):
        return np.concatenate([dense(cast(Sparse, part)) for part in parts])
    if isinstance(parts[0], pa.Array):
        return pa.concat_arrays(parts)
    return np.concatenate(cast(Any, parts))


def fit(made: Feature, columns: Columns, size: int = 100) -> Any:
    """Return what a feature makes of the rows it has learnt from."""
    return encode(made, columns, learn(made, columns, size))


def dense(sparse: Sparse) -> np.ndarray[Any, Any]:
    """Return sparse rows as a matrix; check that indices ascend within each row."""
    out = np.zeros((len(sparse.offsets) - 1, sparse.width), np.float64)
    of_row = np.repeat(np.arange(len(out)), np.diff(sparse.offsets))
    same = of_row[1:] == of_row[:-1]
    assert (np.diff(sparse.indices)[same] > 0).all()
    out[of_row, sparse.indices] = sparse.values
    return out


def plain(learnt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was learnt as plain values, for comparison."""
    return {key: np.asarray(value).tolist() for key, value in learnt.items()}
