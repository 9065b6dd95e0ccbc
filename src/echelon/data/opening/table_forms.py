"""The two forms of a table: named fields, or vectors `dense` and `ids` that are ready to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import dense
from echelon.data.moments import Moments
from echelon.data.opening.categories import category_numbers, learn_categories, tell_apart
from echelon.data.opening.features import filled, find_features, prepared
from echelon.data.opening.frames import Frame
from echelon.data.opening.splits import fit_moments, mean_and_std
from echelon.data.shards.manifest import read_manifest
from echelon.data.sources import ColumnSource, Subset

Array: TypeAlias = np.ndarray[Any, Any]
Others: TypeAlias = Mapping[str, Array]


def is_ready(frame: Frame) -> bool:
    return {"dense", "ids"} <= set(frame.names)


def learn_ready(frame: Frame, rows: Array) -> dict[str, Any]:
    """Sizes of the fields, and moments of the numbers, of vectors that are ready."""
    if frame.stored is not None:
        highest = read_manifest(frame.stored).statistics["ids"]["max"]
    else:
        highest = _ids(frame).max(0).tolist()
    source = Subset(prepared(frame, ["dense"], _float_dense, {}), torch.from_numpy(rows))
    width = dense(source.gather(torch.zeros(1, dtype=torch.int64)), "dense").shape[1]
    moments = fit_moments(source, "dense", (width,))
    return {
        "form": "ready",
        "cardinalities": [int(value) + 1 for value in highest],
        **mean_and_std(moments),
    }


def ready_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
    mean = torch.tensor(fitted["mean"], dtype=torch.float32)
    sizes = torch.tensor(fitted["cardinalities"])
    widths = [len(mean), len(sizes)]

    def prepare(batch: Batch) -> Batch:
        numbers, ids = dense(batch, "dense").to(torch.float32), dense(batch, "ids").to(torch.int64)
        if [numbers.shape[1], ids.shape[1]] != widths:
            raise DataError(
                f"{frame.where}: {numbers.shape[1]} numbers and {ids.shape[1]} ids per record; "
                f"the model is trained on {widths[0]} and {widths[1]}"
            )
        known = (ids >= 0) & (ids < sizes)
        return {"dense": filled(numbers, mean), "ids": ids.where(known, 0)}

    return prepared(frame, ["dense", "ids"], prepare, others)


def learn_fields(frame: Frame, section: DataSection, target: str, rows: Array) -> dict[str, Any]:
    """Categories and moments of named fields."""
    features = find_features(frame, section.columns, {target})
    numbers, names = tell_apart(frame, features, section.options.get("categories", ()))
    categories = {name: learn_categories(frame, name, rows, section.vocabulary) for name in names}
    moments = Moments((len(numbers),))
    moments.add(_matrix(frame, numbers)[rows])
    return {
        "form": "fields",
        "numbers": numbers,
        "categories": categories,
        "cardinalities": [len(values) + 1 for values in categories.values()],
        **mean_and_std(moments),
    }


def fields_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
    numbers = torch.from_numpy(_matrix(frame, fitted["numbers"]))
    mean = torch.tensor(fitted["mean"], dtype=torch.float32)
    ids = category_numbers(frame, fitted["categories"])
    return ColumnSource({"dense": filled(numbers, mean), "ids": ids, **others})


def _matrix(frame: Frame, names: Sequence[str]) -> Array:
    out = np.empty((len(frame), len(names)), np.float32)
    for number, name in enumerate(names):
        column = frame.array(name)
        if column.ndim > 1:
            raise DataError(f"{frame.where}: column {name!r} has several numbers per record")
        out[:, number] = column
    return out


def _ids(frame: Frame) -> Array:
    ids = frame.array("ids")
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise DataError(f"{frame.where}: `ids` must hold a row of whole numbers from 0 on")
    return ids


def _float_dense(batch: Batch) -> Batch:
    return {"dense": dense(batch, "dense").to(torch.float32)}
