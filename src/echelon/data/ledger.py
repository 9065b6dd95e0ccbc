"""Which part of each epoch was consumed, at which version: the proof of exactly-once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from echelon.core.errors import RunError
from echelon.core.types import Lease
from echelon.data.ledger_epoch import EpochPage, Proof
from echelon.data.record import Record

_NOTHING = [-1] * len(Record._fields)
"""A record that no commit continues."""


class LedgerError(AssertionError):
    """Someone broke the rules of leasing. A bug, never the user's mistake."""


class Ledger:
    """Hands out leases and records what became of them.

    It knows positions, not batches or workers: its state is a few intervals whatever the number of
    steps, and another batch size or another number of workers can go on from it.
    It is not locked: leases are drawn and committed in one thread.
    """

    dry = False
    """Whether others hold all that is left, where leases come from elsewhere."""

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
        `remaining` is not 0, leases are out, and those that come back want another call.
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

        A second commit is refused; but as the update was made, it is recorded for the proof.
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
        """Record an update that others made of samples that were not out on lease here."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if page.free.take(start, stop):
            page.out.add(start, stop)
        self.commit(lease, version)

    def leave_out(self, lease: Lease, version: int) -> None:
        """Record that this lease is consumed at `version`, which it did not change."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if not page.out.take(start, stop):
            raise LedgerError(f"{lease} is left out but was not out on lease")
        page.commit(start, stop, version)
        self._note(epoch, start, stop, version + 1, version)
        self._record = _NOTHING  # an update to the next version is no part of it

    def drain(self) -> list[Record]:
        """What was recorded since this was last called, for a journal."""
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
        """Return everything out on lease: those who held it are gone."""
        for page in self._pages.values():
            page.give_back_all()

    def remaining(self, epoch: int) -> int:
        """How many samples of the epoch are not committed yet."""
        return self.proof(epoch).never

    def proof(self, epoch: int) -> Proof:
        if epoch in self._whole:
            return Proof(self.samples, self.samples, 0, 0)
        page = self._pages.get(epoch)
        return page.proof() if page else Proof(self.samples, 0, 0, self.samples)

    def versions(self, epoch: int) -> tuple[int, int] | None:
        """The first and the last version that consumed something of the epoch."""
        page = self._pages.get(epoch)
        if page is None:
            return self._whole.get(epoch)
        return None if page.first is None or page.last is None else (page.first, page.last)

    def state_dict(self) -> dict[str, Any]:
        """What was consumed, as plain JSON data."""
        self._file_away()
        pages = sorted(self._pages.items())
        return {
            "samples": self.samples,
            "whole": [[epoch, *versions] for epoch, versions in sorted(self._whole.items())],
            "parts": [{"epoch": n, **page.state_dict()} for n, page in pages if page.done],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says."""
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
