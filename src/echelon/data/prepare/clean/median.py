"""The exact median of more numbers than fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_BITS = 16
_CHUNK = 1 << 20
_SIGN = np.uint64(1 << 63)


class Median:
    """Numbers go to a file; the one in the middle is found by its bits, sixteen at a time.

    Floats sort like their bits as whole numbers, once the negative ones are turned round. Four
    times over the file: how many numbers have which next sixteen bits says in which of them the
    middle is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        path.write_bytes(b"")

    def add(self, values: NDArray[np.float64]) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(values, np.float64).tobytes())
        self._count += len(values)

    def value(self) -> float | None:
        """The middle one, or the mean of the two in the middle; None of nothing."""
        if not self._count:
            return None
        low, high = self._at((self._count - 1) // 2), self._at(self._count // 2)
        middle = (low + high) / 2  # rounded once: a difference would be rounded too
        return middle if np.isfinite(middle) else low / 2 + high / 2

    def _at(self, place: int) -> float:
        """The number that would stand at this place if all were in order."""
        found = 0
        for shift in range(64 - _BITS, -1, -_BITS):
            counts = np.zeros(1 << _BITS, np.int64)
            for keys in self._keys():
                # Shifting by all 64 bits is not defined: at first all are alike.
                same = (
                    keys if shift == 64 - _BITS else keys[keys >> np.uint64(shift + _BITS) == found]
                )
                part = (same >> np.uint64(shift)) & np.uint64((1 << _BITS) - 1)
                counts += np.bincount(part.astype(np.int64), minlength=1 << _BITS)
            below = np.cumsum(counts)
            digit = int(np.searchsorted(below, place, side="right"))
            place -= int(below[digit - 1]) if digit else 0
            found = found << _BITS | digit
        return float(_float(np.array([found], np.uint64))[0])

    def _keys(self) -> Iterator[NDArray[np.uint64]]:
        with self._path.open("rb") as file:
            while chunk := file.read(8 * _CHUNK):
                bits = np.frombuffer(chunk, np.uint64)
                yield np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _float(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)
