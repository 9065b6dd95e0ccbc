"""Small data sets as Arrow tables, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.opening.parts import Part
from echelon.data.readers import read
from echelon.data.shards.encode_arrow import WIDTH, sparse_pairs

Usual: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options of readers, by format."""
_MOST_NUMBERS = 1 << 28
"""Numbers of sparse rows that are held densely."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A table, and what to call it in a message."""

    table: Any
    where: str
    stored: Path | None = None
    """The folder of shards whose memory map the table is."""

    @property
    def names(self) -> list[str]:
        names: list[str] = self.table.column_names
        return names

    def __len__(self) -> int:
        rows: int = self.table.num_rows
        return rows

    def has(self, name: str) -> bool:
        """Whether there is such a column, with anything in it."""
        return name in self.names and not pa.types.is_null(self.table.column(name).type)

    def column(self, name: str, what: str = "column") -> Any:
        if name not in self.names:
            raise DataError(f"{self.where}: {unknown(what, name, self.names)}")
        return self.table.column(name)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers, [N] or [N, …]; missing ones become NaN."""
        column = self.column(name)
        kind = column.type
        if pa.types.is_null(kind):
            return np.full(len(self), np.nan, np.float32)
        if isinstance(kind, pa.FixedShapeTensorType):
            parts = [chunk.to_numpy_ndarray() for chunk in column.chunks]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        if sparse_pairs(kind):
            return self._dense_rows(name, column.combine_chunks())
        if (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            return self._vectors(name, column.combine_chunks())
        if pa.types.is_boolean(kind):
            column = column.cast(pa.uint8())
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{self.where}: column {name!r} is of type {kind}: not numbers")
        values: np.ndarray[Any, Any] = column.to_numpy()
        return values

    def _dense_rows(self, name: str, column: Any) -> np.ndarray[Any, Any]:
        """Sparse rows as vectors, as long as that is not much; what is much is prepared first."""
        about = self.table.schema.field(name).metadata or {}
        entries, lengths = column.flatten(), column.value_lengths().to_numpy()
        indices = entries.field("index").to_numpy()
        width = max(int(about.get(WIDTH, b"1")), 1 + int(indices.max(initial=0)))
        if len(self) * width > _MOST_NUMBERS:
            raise DataError(
                f"{self.where}: column {name!r} is sparse, {len(self)} rows of {width} numbers: "
                f"make shards of it with `echelon data prepare` (feature `sparse`)"
            )
        dense = np.zeros((len(self), width), np.float32)
        dense[np.repeat(np.arange(len(self)), lengths), indices] = entries.field("value").to_numpy()
        return dense

    def _vectors(self, name: str, column: Any) -> np.ndarray[Any, Any]:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(lengths != lengths[0])
        if len(odd):
            raise DataError(
                f"{self.where}: column {name!r} has {lengths[0]} numbers in record 0, "
                f"but {lengths[odd[0]]} in record {odd[0]}"
            )
        flat = column.flatten()
        if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
            raise DataError(f"{self.where}: column {name!r} is of type {column.type}: not numbers")
        values: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
        return values.reshape(len(column), -1)


def load(part: Part, options: Mapping[str, Any] | None = None, usual: Usual | None = None) -> Frame:
    """Read a part into memory, by the options that are `usual` for its format where no others are
    given."""
    told = (usual or {}).get(part.format, {})
    given = {**told, **part.options, **(options or {})}
    if "types" in told and isinstance(given["types"], Mapping):
        given["types"] = {**told["types"], **given["types"]}
    tables = [pa.Table.from_batches(list(read(path, part.format, **given))) for path in part.paths]
    if len(tables) == 1:
        mapped = part.paths[0] if part.format == "shards" else None
        return Frame(tables[0], part.where, mapped)
    try:
        return Frame(pa.concat_tables(tables, promote_options="permissive"), part.where)
    except pa.ArrowException as error:
        raise DataError(f"{part.where}: its files differ: {error}") from None


def class_names(part: Part) -> list[str]:
    """The names of the classes, where `labels.txt` or `classes.txt` lies beside the data."""
    for name in ("labels.txt", "classes.txt"):
        path = part.paths[0].parent / name
        if path.is_file():
            return path.read_text(encoding="utf-8").splitlines()
    return []
