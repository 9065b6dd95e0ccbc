"""A stretch of commits: how the ledger tells a journal what it was told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Record(NamedTuple):
    """Positions [start, stop) of an epoch, consumed by the updates to versions first … last.

    The updates followed one another and so did their leases, which were all of one size; only the
    last may have been shorter. Samples that were left out, because their update was not finite,
    are consumed without an update: they stand between two versions, and `first` is `last` + 1.
    """

    epoch: int
    start: int
    stop: int
    first: int
    last: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def left_out(self) -> bool:
        return self.last < self.first

    def until(self, version: int, size: int) -> Record | None:
        """What of it was done at `version`, where leases had `size` samples."""
        if self.last <= version:
            return self
        if version < self.first:
            return None
        stop = self.start + (version - self.first + 1) * size
        return self._replace(stop=min(stop, self.stop), last=version)

    def after(self, version: int, size: int) -> Record | None:
        """What of it was done after `version`, where leases had `size` samples."""
        if version < self.first:
            return self
        if self.last <= version:
            return None
        start = self.start + (version - self.first + 1) * size
        return self._replace(start=min(start, self.stop), first=version + 1)


def after(records: Iterable[Record], version: int, size: int) -> list[Record]:
    """What of these records came after `version`: the rest is known already."""
    rest = (record.after(version, size) for record in records)
    return [record for record in rest if record is not None]
