"""What is applied: samples by epoch, so that none counts twice, and records of it for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from echelon.core.types import Lease
from echelon.data.intervals import Intervals


class Record(NamedTuple):
    """Samples of an update; those left out, without one, have the member −1 − itself."""

    epoch: int
    start: int
    stop: int
    version: int
    member: int


class _Page:
    __slots__ = ("done", "first", "last")

    def __init__(self, first: int, last: int, done: Intervals) -> None:
        self.first, self.last, self.done = first, last, done


class Applied:
    """The gate's ledger."""

    def __init__(self, samples: int | None, keep: int | None = None) -> None:
        self._samples = samples
        self._keep = keep
        """Versions whose records are kept although nobody asks for them."""
        self._pages: dict[int, _Page] = {}
        self._records: deque[Record] = deque()
        self._left_out: list[Record] = []
        self._last: dict[int, tuple[int, int]] = {}

    def makes_sense(self, lease: Lease) -> bool:
        end = self._samples if self._samples is not None else lease.stop
        return lease.epoch >= 0 and 0 <= lease.start <= lease.stop <= end

    def add(self, member: int, seq: int, lease: Lease, version: int) -> None:
        self._last[member] = seq, version
        if lease.size:
            self._commit(lease, version)
            self._records.append(Record(*lease, version, member))
        if self._keep is not None:
            self.recorded(version - self._keep)

    def leave_out(self, member: int, lease: Lease, version: int) -> None:
        """These samples are done with, without an update; told again they are so already."""
        if lease.size and not self.done(lease):
            self._commit(lease, version)
            self._left_out.append(Record(*lease, version, -1 - member))

    def _commit(self, lease: Lease, version: int) -> None:
        page = self._pages.get(lease.epoch)
        if page is None:
            page = self._pages[lease.epoch] = _Page(version, version, Intervals())
        page.done.add(lease.start, lease.stop)
        page.last = version

    def was(self, member: int, seq: int) -> int | None:
        """The version that this very push made, if it was the member's last."""
        last = self._last.get(member)
        return last[1] if last is not None and last[0] == seq else None

    def done(self, lease: Lease) -> int:
        """How many of these samples are applied."""
        page = self._pages.get(lease.epoch)
        return page.done.overlap(lease.start, lease.stop) if page is not None else 0

    def parts(self, lease: Lease) -> list[tuple[int, int]]:
        """Which of them are."""
        page = self._pages.get(lease.epoch)
        return page.done.common(lease.start, lease.stop) if page is not None else []

    def records(self, after: int) -> list[Record]:
        """What is applied after this version, in its order.

        What was left out at a version follows it, and may be told more than once: it can come when
        the version itself is on record already.
        """
        found = [record for record in self._records if record.version > after]
        left_out = [record for record in self._left_out if record.version >= after]
        return sorted(found + left_out, key=lambda record: (record.version, record.member < 0))

    def recorded(self, version: int) -> None:
        """What came up to this version is on record elsewhere."""
        records = self._records
        while records and records[0].version <= version:
            records.popleft()
        self._left_out = [record for record in self._left_out if record.version >= version]

    def state_dict(self) -> dict[str, Any]:
        """As every ledger is saved, and what it takes to go on in the middle of a run."""
        whole, parts = [], []
        for epoch, page in sorted(self._pages.items()):
            if self._samples is not None and page.done.total == self._samples:
                whole.append([epoch, page.first, page.last])
            else:
                done = [list(pair) for pair in page.done]
                versions = [page.first, page.last]
                parts.append({"epoch": epoch, "versions": versions, "done": done, "twice": []})
        return {"samples": self._samples, "whole": whole, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        samples = state["samples"]
        self._pages = {
            epoch: _Page(first, last, Intervals([(0, samples)]))
            for epoch, first, last in state["whole"]
        }
        for part in state["parts"]:
            done = Intervals((start, stop) for start, stop in part["done"])
            first, last = part["versions"]
            self._pages[part["epoch"]] = _Page(first, last, done)
        self._records.clear()
        self._left_out.clear()
        self._last.clear()

    def pending(self) -> dict[str, Any]:
        """What is not part of a cut, but of a gate that takes over."""
        return {
            "records": [list(record) for record in self._records],
            "left_out": [list(record) for record in self._left_out],
            "last": [[member, *last] for member, last in self._last.items()],
        }

    def load_pending(self, state: Mapping[str, Any]) -> None:
        self._records = deque(Record(*record) for record in state["records"])
        self._left_out = [Record(*record) for record in state["left_out"]]
        self._last = {member: (seq, version) for member, seq, version in state["last"]}
