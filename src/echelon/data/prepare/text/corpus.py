"""Numbered tokens of all texts on disk, read in pieces of whole texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.learnt import Learnt

_PIECE = 1 << 16


class Passage(NamedTuple):
    """Some texts: their tokens one after the other, and the text each belongs to."""

    tokens: NDArray[Any]
    texts: NDArray[Any]


class Corpus:
    """The tokens that `look` found, block after block."""

    def __init__(self, partials: Iterable[Learnt], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = [np.empty(0, np.int64)]
        with path.open("wb") as file:
            for partial in partials:
                np.ascontiguousarray(partial["tokens"], np.int32).tofile(file)
                lengths.append(partial["lengths"].astype(np.int64))
        self._path = path
        self._offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        wanted = np.arange(0, self.size, _PIECE)
        self._cuts = np.unique([*np.searchsorted(self._offsets, wanted), len(self._offsets) - 1])

    @property
    def size(self) -> int:
        """Tokens in all."""
        return int(self._offsets[-1])

    def __len__(self) -> int:
        """How many passages there are."""
        return len(self._cuts) - 1

    def __getitem__(self, number: int) -> Passage:
        low, high = int(self._cuts[number]), int(self._cuts[number + 1])
        start, stop = int(self._offsets[low]), int(self._offsets[high])
        tokens = np.fromfile(self._path, np.int32, stop - start, offset=start * 4)
        lengths = np.diff(self._offsets[low : high + 1])
        return Passage(tokens, np.repeat(np.arange(high - low), lengths))
