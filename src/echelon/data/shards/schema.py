"""What a column holds, and how Arrow stores it.

| kind     | one sample                  | stored as                                |
|----------|-----------------------------|------------------------------------------|
| dense    | numbers of one fixed shape  | the number, or a fixed-shape tensor      |
| sequence | numbers, as many as it has  | large_list                               |
| sparse   | a row of a CSR matrix       | large_list of (index, value) pairs       |
| string   | text                        | large_utf8                               |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["dense", "sequence", "sparse", "string"]

# Arrow packs booleans into bits and numpy has no bfloat16: both are kept as plain integers.
_STORAGE = {"bool": "uint8", "bfloat16": "uint16"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *_FLOATS,
)
"""By their names: torch and numpy call them alike."""
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Field:
    """One column: its kind, the type of its numbers, the shape of one dense sample."""

    name: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    width: int = 0
    """Columns of the CSR matrix a sparse row belongs to."""

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # those who only write shards do without

        assert self.dtype in DTYPES, self.dtype
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def is_floating(self) -> bool:
        return self.dtype in _FLOATS

    @property
    def storage(self) -> np.dtype[Any]:
        """What the numbers are stored as."""
        return np.dtype(_STORAGE.get(self.dtype, self.dtype))

    @property
    def index_storage(self) -> np.dtype[Any]:
        """What the column numbers of a sparse row are stored as."""
        return np.dtype(np.int32 if self.width < _INT32_LIMIT else np.int64)

    @property
    def item_bytes(self) -> int:
        """Bytes of one dense sample."""
        return self.storage.itemsize * math.prod(self.shape)

    @property
    def item(self) -> np.dtype[Any]:
        """One dense sample as an opaque item: it is moved whole, whatever its numbers are."""
        size = self.item_bytes
        return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")

    def arrow_type(self) -> Any:
        if self.kind == "string":
            return pa.large_utf8()
        number = pa.from_numpy_dtype(self.storage)
        if self.kind == "dense":
            return pa.fixed_shape_tensor(number, self.shape) if self.shape else number
        if self.kind == "sequence":
            return pa.large_list(number)
        index = pa.from_numpy_dtype(self.index_storage)
        return pa.large_list(pa.struct([("index", index), ("value", number)]))

    def __str__(self) -> str:
        if self.kind == "string":
            return "string"
        if self.kind == "sparse":
            return f"sparse {self.dtype} of width {self.width}"
        return " ".join([self.kind, self.dtype, *([str(list(self.shape))] if self.shape else [])])

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.kind != "string":
            plain["dtype"] = self.dtype
        if self.kind == "dense":
            plain["shape"] = list(self.shape)
        if self.kind == "sparse":
            plain["width"] = self.width
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Field:
        """Raises KeyError, TypeError or ValueError where `plain` is not a field."""
        field = cls(
            str(plain["name"]),
            plain["kind"],
            plain.get("dtype", ""),
            tuple(int(size) for size in plain.get("shape", ())),
            int(plain.get("width", 0)),
        )
        if field.kind not in get_args(Kind):
            raise ValueError(f"kind {field.kind!r}")
        if field.kind != "string" and field.dtype not in DTYPES:
            raise ValueError(f"dtype {field.dtype!r}")
        return field


Schema: TypeAlias = tuple[Field, ...]


def arrow_schema(schema: Schema) -> Any:
    return pa.schema([pa.field(field.name, field.arrow_type()) for field in schema])


def same_schema(expected: Schema, found: Schema, where: str) -> None:
    """Refuse columns that are not those of the batches before."""
    names = [field.name for field in expected]
    if names != [field.name for field in found]:
        given = ", ".join(field.name for field in found)
        raise DataError(f"{where}: the columns are {given}; before they were {', '.join(names)}")
    for old, new in zip(expected, found, strict=True):
        if old != new:
            raise DataError(f"{where}: column {new.name!r} is {new}; before it was {old}")


def check_names(schema: Schema) -> None:
    """Refuse names that a batch could not tell apart."""
    names = [field.name for field in schema]
    lengths = [length_name(field.name) for field in schema if field.kind == "sequence"]
    for name in (*names, *lengths):
        if [*names, *lengths].count(name) > 1:
            raise DataError(f"two columns of a batch would be called {name!r}")


def length_name(sequence: str) -> str:
    """The column that says how long each sequence of a batch is."""
    return f"{sequence}_length"


def unsupported(name: str, what: object, accepted: Sequence[str]) -> DataError:
    return DataError(f"column {name!r} is {what}; it must be one of: {', '.join(accepted)}")
