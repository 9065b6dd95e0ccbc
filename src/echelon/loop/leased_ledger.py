"""A ledger whose leases come from the coordinator and whose records come from the servers.

    coordinator ── a range of several batches ──▶ this member ── push, batch by batch ──▶ servers
         ▲                                                                                  │
         └── records, from the first member ◀── what was applied, by whom, at which version ┘

Members that update servers independently use it in place of their own `Ledger`. The servers know at
any time which samples are consumed; the members know it as of their last meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from echelon.core.errors import PeerError
from echelon.core.interfaces import RemoteStrategy
from echelon.core.types import Lease
from echelon.data.intervals import Intervals
from echelon.data.ledger import Ledger, LedgerError

HELD = 16
"""Batches that a member leases at a time, as long as there are plenty."""


class Leasing(Protocol):
    """The part of an elastic group that hands out leases."""

    index: int
    pace: float | None

    @property
    def generation(self) -> int: ...

    def lease(
        self, epoch: int, wanted: int, unit: int, used: Sequence[tuple[int, int]]
    ) -> list[Lease]: ...

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None: ...

    def recorded(self) -> int: ...


class SharedLedger(Ledger):
    """One member's view of the ledger that all members share.

    `_mine` are the positions that this member holds and has not begun, `_out` those that it works
    on, `_used` those that it has pushed since its last request for a lease.
    """

    def __init__(self, samples: int, comm: Leasing, strategy: RemoteStrategy) -> None:
        super().__init__(samples)
        self._comm, self._strategy = comm, strategy
        self._epoch = -1
        self._mine, self._out = Intervals(), Intervals()
        self._used: list[tuple[int, int]] = []
        self._reported, self._reported_in = 0, 0
        self._left_out: set[tuple[int, ...]] = set()

    def leases(self, epoch: int, size: int) -> Iterator[Lease]:
        """Yield leases of at most `size` samples, or of the servers' share, from what this member
        holds. Request more only if it holds nothing."""
        size = self._strategy.share or size
        if epoch != self._epoch:
            self.drop(epoch)
        if not self._mine:
            self._hold(size)
        while self._mine:
            start, stop = self._mine.pop(self._strategy.share or size)
            self._out.add(start, stop)
            yield Lease(epoch, start, stop)

    def _hold(self, size: int) -> None:
        self._comm.pace = self._strategy.pace
        held = self._comm.lease(self._epoch, HELD * size, size, self._used)
        self._used.clear()
        for _, start, stop in held:
            self._mine.add(start, stop)
        self.dry = not self._mine

    def commit(self, lease: Lease, version: int) -> None:  # noqa: ARG002 (the servers know it)
        if not self._out.take(lease.start, lease.stop):
            raise LedgerError(f"{lease} is committed but was not out on lease")
        self._used.append((lease.start, lease.stop))

    def leave_out(self, lease: Lease, version: int) -> None:
        self._strategy.leave_out(lease)
        self.commit(lease, version)

    def give_back(self, lease: Lease) -> None:
        """Keep a lease that was not trained on, to be trained on again."""
        if not self._out.take(lease.start, lease.stop):
            raise LedgerError(f"{lease} is given back but was not out on lease")
        self._mine.add(lease.start, lease.stop)

    def give_back_all(self) -> None:
        for start, stop in self._out:
            self._mine.add(start, stop)
        self._out.clear()

    def drain(self) -> list[Any]:
        """Return what the servers applied since the last call, in version order.

        Only the first member returns anything. If the servers cannot be reached, they keep their
        records for the first member of the next generation. Records that were reported in the last
        generation but are not in the journal are reported again: that report may be lost.
        """
        if self._comm.index != 0:
            return []
        if self._reported_in != self._comm.generation:
            self._reported, self._reported_in = self._comm.recorded(), self._comm.generation
            self._left_out.clear()
        try:
            found = self._strategy.unheard(self._comm.recorded())
        except PeerError:
            return []
        # A record of skipped samples may arrive after its version was reported, and stays among the
        # unrecorded ones until a later version is recorded: report each only once.
        before, self._left_out = self._left_out, {tuple(r) for r in found if r[4] < 0}
        fresh = self._left_out - before
        new = [r for r in found if r[3] > self._reported or tuple(r) in fresh]
        self._reported = max([self._reported, *(record[3] for record in new)])
        return [_journal_row(*record) for record in new]

    def meet(self) -> None:
        """Ask the servers what is consumed. Called while no member pushes."""
        super().load_state_dict(self._strategy.consumed())
        self.dry = False

    def open(self, version: int) -> None:
        """Start a new generation: no member holds a lease, and all know what is consumed."""
        self.meet()
        self.drop()
        self._reported = self._comm.recorded()  # the run may have gone back to a checkpoint
        self._comm.open_ledger(version, self.state_dict())

    def consumed(self) -> int:
        """Return the number of consumed samples, as of the last meeting."""
        return self.samples * len(self._whole) + sum(p.done.total for p in self._pages.values())

    def drop(self, epoch: int = -1) -> None:
        """Forget all leases of this member."""
        self._epoch, self.dry = epoch, False
        self._mine.clear()
        self._out.clear()
        self._used.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.drop()


def _journal_row(epoch: int, start: int, stop: int, version: int, member: int) -> list[int]:
    """Convert a server's record to the journal's form. A negative member skipped these samples."""
    if member < 0:
        return [epoch, start, stop, version + 1, version]
    return [epoch, start, stop, version, version, member]
