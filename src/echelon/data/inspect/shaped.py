"""What a column of several numbers per record holds: sequences, sparse rows, vectors and images."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.hashing import Words, words
from echelon.data.inspect.columns import Look, of_sample
from echelon.data.inspect.numbers import SAMPLED, Figures, Numbers
from echelon.data.inspect.sample import Sample, record_keys
from echelon.data.moments import Moments
from echelon.data.shards.encode_arrow import WIDTH, sparse_pairs

_CHANNELS = 4
_PLACES = 64
"""Numbers looked at in each record of a sample of tensors."""


class ListLook(Look):
    """Sequences of any length, and rows of a sparse matrix."""

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self.kind = "sparse" if sparse_pairs(field.type) else "sequence"
        self._lengths = Numbers()
        self._values = Numbers()
        self._count = 0

    def fits(self, field: Any) -> bool:
        return bool(sparse_pairs(field.type) == (self.kind == "sparse"))

    def type_name(self) -> str:
        if self.kind == "sequence":
            return super().type_name()
        metadata = self.field.metadata or {}
        width = f" of width {int(metadata[WIDTH]):,}" if WIDTH in metadata else ""
        return f"sparse {self.field.type.value_type.field('value').type}{width}"

    def _take(self, column: Any, keys: Words) -> None:
        self._lengths.add(pc.list_value_length(column).to_numpy(), keys)
        values = column.flatten()
        if self.kind == "sparse":
            values = values.field("value")
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            plain = values.drop_null().to_numpy()
            self._values.add(plain, record_keys(self._count, len(plain)))
            self._count += len(plain)

    def _found(self) -> dict[str, Any]:
        return {"lengths": self._lengths.figures(), "numbers": self._values.figures()}


class TensorLook(Look):
    """Numbers of one shape per record."""

    kind = "tensor"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        kind = field.type
        tensor = isinstance(kind, pa.FixedShapeTensorType)
        self._shape = tuple(kind.shape) if tensor else (kind.list_size,)
        self._moments = Moments(self._shape)
        self._size = math.prod(self._shape)
        self._sample = Sample(max(1, SAMPLED // min(self._size, _PLACES)))

    def fits(self, field: Any) -> bool:
        return str(field.type) == str(self.field.type)

    def type_name(self) -> str:
        return f"{self.field.type.value_type} {list(self._shape)}"

    def _take(self, column: Any, keys: Words) -> None:
        rows = self._rows(column)
        self._moments.add(rows)
        chosen = self._sample.chosen(keys)
        self._sample.add(
            keys[chosen], self._some(rows.reshape(len(rows), -1)[chosen], keys[chosen])
        )

    def _rows(self, column: Any) -> np.ndarray[Any, Any]:
        if isinstance(column.type, pa.FixedShapeTensorType):
            found: np.ndarray[Any, Any] = column.to_numpy_ndarray()
            return found
        return np.asarray(column.flatten()).reshape(-1, *self._shape)

    def _some(self, rows: np.ndarray[Any, Any], keys: Words) -> np.ndarray[Any, Any]:
        """Some places of each record, others in each."""
        if self._size <= _PLACES:
            return rows.astype(np.float64)
        draws: Words = np.add.outer(keys, np.arange(_PLACES, dtype=np.uint64))
        places = (words(draws, 2) % np.uint64(self._size)).astype(np.int64)
        return np.take_along_axis(rows, places, 1).astype(np.float64)

    def _found(self) -> dict[str, Any]:
        sample = self._sample.values()
        figures = None if sample is None else of_sample(sample[np.isfinite(sample)], 0)
        if figures is not None:
            figures = self._overall(figures)
        return {"numbers": figures, "shape": self._shape, "channels": self._channels()}

    def _channels(self) -> tuple[tuple[float, float], ...] | None:
        if len(self._shape) != 3 or not 1 < self._shape[0] <= _CHANNELS:
            return None
        return tuple(zip(self._moments.mean.tolist(), self._moments.std.tolist(), strict=True))

    def _overall(self, figures: Figures) -> Figures:
        """Moments of all features or channels together."""
        found = self._moments
        count = found.count.sum()
        mean = float((found.count * found.mean).sum() / count)
        spread = (found.squares + found.count * (found.mean - mean) ** 2).sum() / count
        return replace(
            figures,
            count=int(count),
            min=float(found.min.min()),
            mean=mean,
            max=float(found.max.max()),
            std=math.sqrt(spread),
        )
