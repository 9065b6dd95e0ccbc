"""Which part of each epoch was consumed, and by the update to which version.

A lease is a range of an epoch's order on its way to becoming an update:

    free ── leases() ──▶ out on lease ── commit() ────▶ done, at a version
      ▲                       │       └─ leave_out() ──▶ done, without an update
      └────── give_back() ────┘

`Ledger` keeps one `EpochPage` per epoch. It also notes its commits as `Record`s, which a journal
drains and keeps; `proof` replays them after the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

from echelon.core.errors import CheckpointError, RunError
from echelon.core.types import Lease
from echelon.data.intervals import Intervals


class LedgerError(AssertionError):
    """The rules of leasing were broken. A bug, never the user's mistake."""


class Ledger:
    """The leases of a run: which positions are free, out on lease, or done at which version.

    It knows positions, not batches or workers. So its state is a few intervals after any number of
    steps, and a run can continue from it with another batch size or another number of workers.
    It takes no lock: one thread draws and commits leases.
    """

    dry = False
    """Whether other workers hold all remaining samples. Only a ledger that gets its leases from a
    coordinator can be dry."""

    def __init__(self, samples: int) -> None:
        assert samples > 0, f"a ledger of {samples} samples"
        self.samples = samples
        self._pages: dict[int, EpochPage] = {}
        # An epoch that was consumed whole and exactly once is kept as its first and last version.
        self._whole: dict[int, tuple[int, int]] = {}
        self._records: list[list[int]] = []
        self._record = _NOTHING

    def leases(self, epoch: int, size: int) -> Iterator[Lease]:
        """Lease what is free in ascending order, at most `size` at a time.

        A returned lease comes first again. Exhausted means that nothing is free *now*: while
        `remaining` is not 0, leases are out, and those that come back need another call.
        """
        assert size > 0, f"a lease of {size} samples"
        page = self._page(epoch)
        free, out = page.free, page.out
        while free:
            start, stop = free.pop(size)
            out.add(start, stop)
            yield Lease(epoch, start, stop)

    def commit(self, lease: Lease, version: int) -> None:
        """Record that the update to `version` consumed this lease, or a part of one.

        Raises LedgerError on a second commit. It is recorded all the same, because the update was
        made and the proof must show it.
        """
        epoch, start, stop = lease
        page = self._pages.get(epoch)
        if page is None or not page.out.take(start, stop):
            raise self._refusal(lease, version)
        page.commit(start, stop, version)
        record = self._record
        if start == record[2] and version == record[4] + 1 and epoch == record[0]:
            record[2], record[4] = stop, version
        else:
            self._note(epoch, start, stop, version, version)

    def take_in(self, lease: Lease, version: int) -> None:
        """Record another worker's update of samples that were not out on lease here."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if page.free.take(start, stop):
            page.out.add(start, stop)
        self.commit(lease, version)

    def leave_out(self, lease: Lease, version: int) -> None:
        """Record that this lease is consumed without an update; the version stays `version`."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if not page.out.take(start, stop):
            raise LedgerError(f"{lease} is left out but was not out on lease")
        page.commit(start, stop, version)
        self._note(epoch, start, stop, version + 1, version)
        self._record = _NOTHING  # the next update must not extend this record

    def drain(self) -> list[Record]:
        """Return and forget what was recorded since the last call, for a journal."""
        found = [Record(*record) for record in self._records]
        self._records, self._record = [], _NOTHING
        return found

    def give_back(self, lease: Lease) -> None:
        """Return a lease, or a part of one that is not committed."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if not page.out.take(start, stop):
            raise LedgerError(f"{lease} is given back but was not out on lease")
        page.free.add(start, stop)

    def give_back_all(self) -> None:
        """Return everything out on lease, after its holders were lost."""
        for page in self._pages.values():
            page.give_back_all()

    def remaining(self, epoch: int) -> int:
        """Return how many samples of the epoch are not committed yet."""
        return self.proof(epoch).never

    def proof(self, epoch: int) -> Proof:
        if epoch in self._whole:
            return Proof(self.samples, self.samples, 0, 0)
        page = self._pages.get(epoch)
        return page.proof() if page else Proof(self.samples, 0, 0, self.samples)

    def versions(self, epoch: int) -> tuple[int, int] | None:
        """Return the first and the last version that consumed samples of the epoch."""
        page = self._pages.get(epoch)
        if page is None:
            return self._whole.get(epoch)
        return None if page.first is None or page.last is None else (page.first, page.last)

    def state_dict(self) -> dict[str, Any]:
        """Return what was consumed, as plain JSON data."""
        self._file_away()
        pages = sorted(self._pages.items())
        return {
            "samples": self.samples,
            "whole": [[epoch, *versions] for epoch, versions in sorted(self._whole.items())],
            "parts": [{"epoch": n, **page.state_dict()} for n, page in pages if page.done],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by `state`; what was out on lease is free again."""
        if state["samples"] != self.samples:
            raise RunError(
                f"the run began with {state['samples']} training samples and the data now has "
                f"{self.samples}: resume with the data it began with"
            )
        self._whole = {epoch: (first, last) for epoch, first, last in state["whole"]}
        self._pages = {
            saved["epoch"]: EpochPage.restored(self.samples, saved) for saved in state["parts"]
        }
        self._records, self._record = [], _NOTHING

    def _note(self, *record: int) -> None:
        self._record = list(record)
        self._records.append(self._record)

    def _page(self, epoch: int) -> EpochPage:
        page = self._pages.get(epoch)
        if page is None:
            self._file_away()
            page = EpochPage(self.samples)
            if versions := self._whole.pop(epoch, None):
                whole = {"versions": versions, "done": [[0, self.samples]], "twice": []}
                page = EpochPage.restored(self.samples, whole)
            self._pages[epoch] = page
        return page

    def _file_away(self) -> None:
        for epoch, page in list(self._pages.items()):
            if page.proof().once == self.samples and (versions := self.versions(epoch)):
                self._whole[epoch] = versions
                del self._pages[epoch]

    def _refusal(self, lease: Lease, version: int) -> LedgerError:
        epoch, start, stop = lease
        page = self._page(epoch)
        if not page.done.overlap(start, stop):
            return LedgerError(f"{lease} is committed but was not out on lease")
        count = page.commit_again(start, stop, version)
        self._note(epoch, start, stop, version, version)
        return LedgerError(f"{count} samples of {lease} are committed a second time")


class Proof(NamedTuple):
    """How many of an epoch's `samples` were consumed once, more than once, and never."""

    samples: int
    once: int
    twice: int
    never: int


class EpochPage:
    """One epoch: every position is free, out on lease or done; `twice` is what was done again."""

    __slots__ = ("done", "first", "free", "last", "out", "samples", "twice")

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.free = Intervals([(0, samples)])
        self.out = Intervals()
        self.done = Intervals()
        self.twice = Intervals()
        self.first: int | None = None
        self.last: int | None = None

    def commit(self, start: int, stop: int, version: int) -> None:
        """Record a range that the caller has removed from `free` and `out`."""
        self.done.add(start, stop)
        if self.last is None or version > self.last:
            self.last = version
        if self.first is None or version < self.first:
            self.first = version

    def commit_again(self, start: int, stop: int, version: int) -> int:
        """Record a range that is partly done already, and return how many samples are."""
        again = self.done.common(start, stop)
        for first, last in again:
            self.twice.add(first, last)
        self.free.remove(start, stop)
        self.out.remove(start, stop)
        self.commit(start, stop, version)
        return sum(last - first for first, last in again)

    def give_back_all(self) -> None:
        for start, stop in self.out:
            self.free.add(start, stop)
        self.out.clear()

    def proof(self) -> Proof:
        done, twice = self.done.total, self.twice.total
        return Proof(self.samples, done - twice, twice, self.samples - done)

    def state_dict(self) -> dict[str, Any]:
        """Return what is done. Leases are left out, because they end with their holders."""
        return {
            "versions": [self.first, self.last],
            "done": [list(pair) for pair in self.done],
            "twice": [list(pair) for pair in self.twice],
        }

    @classmethod
    def restored(cls, samples: int, state: Mapping[str, Any]) -> Self:
        """Return the page with this state; what was out on lease is free again."""
        page = cls(samples)
        page.first, page.last = state["versions"]
        for start, stop in state["done"]:
            if not page.free.take(start, stop):
                raise CheckpointError(
                    f"the ledger's range [{start}, {stop}) overlaps another or is not within "
                    f"[0, {samples})"
                )
            page.done.add(start, stop)
        page.twice = Intervals((start, stop) for start, stop in state["twice"])
        return page


class Record(NamedTuple):
    """Positions [start, stop) of an epoch, consumed by the updates to versions first … last.

    The updates followed one another, and so did their leases. All leases had the same size, except
    that the last may be shorter. Samples whose update was left out because it was not finite are
    consumed between two versions; their record has `first` = `last` + 1.
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
        """Return the part that was done at `version`, given leases of `size` samples."""
        if self.last <= version:
            return self
        if version < self.first:
            return None
        stop = self.start + (version - self.first + 1) * size
        return self._replace(stop=min(stop, self.stop), last=version)

    def after(self, version: int, size: int) -> Record | None:
        """Return the part that was done after `version`, given leases of `size` samples."""
        if version < self.first:
            return self
        if self.last <= version:
            return None
        start = self.start + (version - self.first + 1) * size
        return self._replace(start=min(start, self.stop), first=version + 1)


_NOTHING = [-1] * len(Record._fields)
"""A record that no commit extends."""


def after(records: Iterable[Record], version: int, size: int) -> list[Record]:
    """Return the parts of these records that were done after `version`."""
    rest = (record.after(version, size) for record in records)
    return [record for record in rest if record is not None]


# Dividing a lease among workers


def edges(size: int, shares: Sequence[float]) -> list[int]:
    """Return where the parts of `size` samples begin and end: one number more than there are parts.

    A part differs from its exact share by less than one sample. Equal shares give the same parts as
    a `Shard` without shares.
    """
    ends = list(accumulate(shares))
    whole = ends[-1]
    return [0, *(int(size * end / whole) for end in ends[:-1]), size]


def counts(size: int, shares: Sequence[float]) -> list[int]:
    """Return how many of `size` samples each part has."""
    return [stop - start for start, stop in pairwise(edges(size, shares))]
