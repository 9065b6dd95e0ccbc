"""numpy's .npy and .npz."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.shards.encode import dense_array

CHUNK = 64 << 20
"""About how many bytes a record batch has."""


def read_numpy(path: Path, *, part: str | None = None) -> Iterator[Any]:
    """Record batches of arrays with one length: `x` of a .npy, or the names within a .npz.

    `part` keeps the arrays of a .npz whose names end in it (`x_train`, `y_train` are the part
    `train`) and drops that ending.
    """
    arrays = load_arrays(path)
    if part is not None:
        arrays = {
            name.removesuffix(f"_{part}"): array
            for name, array in arrays.items()
            if name.endswith(f"_{part}")
        }
    _check(path, arrays)
    rows = len(next(iter(arrays.values())))
    step = max(1, CHUNK * rows // max(1, sum(array.nbytes for array in arrays.values())))
    for start in range(0, rows, step):
        yield pa.record_batch(
            {name: _arrow(array[start : start + step]) for name, array in arrays.items()}
        )


def names_in(path: Path) -> list[str]:
    """The names of the arrays of a .npz."""
    try:
        with zipfile.ZipFile(path) as file:
            return [name.removesuffix(".npy") for name in file.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a whole .npz file: {error}") from None


def load_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file, or those with these names."""
    record = ""
    try:
        if path.suffix == ".npy":
            return {"x": np.load(path, mmap_mode="r", allow_pickle=False)}
        arrays = {}
        with np.load(path, allow_pickle=False) as file:
            for name in names or file.files:
                record = f", array {name!r}"
                arrays[name] = file[name]
        return arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise DataError(f"{path}: not a whole numpy file{record}: {error}") from None


def _check(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    if not arrays or not all(array.ndim and len(array) for array in arrays.values()):
        raise DataError(f"{path}: empty: every array must have at least one row")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{path}: its arrays differ in length: {told}")


def _arrow(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind in "US":
        return pa.array(array.astype(str).tolist())
    return dense_array(array.astype(array.dtype.newbyteorder("="), copy=False))
