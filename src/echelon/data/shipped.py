"""Data sets that come with scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.shards.encode import dense_array

SHIPPED = ("breast_cancer", "diabetes", "digits", "wine")


def load_shipped(name: str, options: Mapping[str, Any] | None = None) -> tuple[Any, list[str]]:
    """A table with the features by name (or images `x` [8, 8]) and `target`; names of classes."""
    if name == "clicks":
        raise DataError("data set 'clicks' holds categories: it is for the task 'click_rate'")
    if name not in SHIPPED:
        raise DataError(unknown("data.name", name, (*SHIPPED, "clicks")))
    if options:
        raise DataError(f"data set {name!r} takes no options; these were given: {list(options)}")
    # scikit-learn takes most of a second to import.
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    if name == "digits":
        columns = {"x": dense_array(found.images.astype(np.float32))}
    else:
        features = np.asarray(found.data, np.float32)
        columns = {
            str(feature): pa.array(features[:, number])
            for number, feature in enumerate(found.feature_names)
        }
    table = pa.table({**columns, "target": pa.array(found.target)})
    return table, [str(label) for label in getattr(found, "target_names", ())]
