"""Some records, one after the other: a few bytes of each, all that dividing them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[Any]
"""A number per record: a class, a group, a time, or a hash of one."""
Codes: TypeAlias = NDArray[np.int8]
Numbers: TypeAlias = NDArray[np.int64]

SPLITS = ("train", "valid", "test")
TRAIN, TEST = 0, 2
FREE = -1


class Part(NamedTuple):
    """Records that follow one another."""

    split: Codes
    """The number of each one's split in SPLITS; FREE: it is to be divided."""
    key: Keys | None = None
    """The class, group or time that they are divided by."""
    kind: Keys | None = None
    """The class that shards and weights are to be balanced by."""
    length: Keys | None = None

    def train_kinds(self) -> Keys:
        assert self.kind is not None, "balanced by a class"
        return np.asarray(self.kind[self.split == TRAIN])

    def repeated(self, times: NDArray[np.int32]) -> Part:
        """Each record so many times."""
        given = (None if values is None else np.repeat(values, times) for values in self)
        return Part(*given)  # type: ignore[arg-type]


def class_key(part: Part) -> Keys:
    """The class of each record; where there are none, all are of one."""
    return np.zeros(len(part.split), np.int8) if part.key is None else part.key


def given_key(part: Part) -> Keys:
    """The group or the time of each record."""
    assert part.key is not None, "groups and times are keys"
    return part.key


Parts: TypeAlias = Callable[[], Iterable[Part]]
"""All records from the first on, as often as they are asked for: they are gone through several
times, and never held together."""
