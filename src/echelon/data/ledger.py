"""Which part of each epoch was consumed, at which version: the proof of exactly-once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from echelon.core.errors import CheckpointError, RunError
from echelon.core.types import Lease
from echelon.data.intervals import Intervals


class LedgerError(AssertionError):
    """Someone broke the rules of leasing. A bug, never the user's mistake."""


class Proof(NamedTuple):
    """Of `samples` in an epoch, how many were consumed once, more than once, and never."""

    samples: int
    once: int
    twice: int
    never: int


class _Epoch:
    """Every position is free, out on lease or done; `twice` is the part of done that was redone."""

    __slots__ = ("done", "first", "free", "last", "out", "twice")

    def __init__(self, samples: int) -> None:
        self.free = Intervals([(0, samples)] if samples else [])
        self.out = Intervals()
        self.done = Intervals()
        self.twice = Intervals()
        self.first: int | None = None
        self.last: int | None = None

    def saw(self, version: int) -> None:
        if self.last is None or version > self.last:
            self.last = version
        if self.first is None or version < self.first:
            self.first = version


class Ledger:
    """Hands out leases and records what became of them.

    It knows positions, not batches or workers: its state is a few intervals whatever the number of
    steps, and can go on with another batch size or another number of workers.
    It is not locked: leases are drawn and committed in one thread.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._epochs: dict[int, _Epoch] = {}

    def leases(self, epoch: int, size: int) -> Iterator[Lease]:
        """Lease what is free in ascending order, at most `size` at a time.

        A returned lease comes first again. Exhausted means that nothing is free *now*: while
        `remaining` is not 0, leases are out, and those that come back want another call.
        """
        assert size > 0, f"a lease of {size} samples"
        entry = self._entry(epoch)
        free, out = entry.free, entry.out
        while free:
            start, stop = free.pop(size)
            out.add(start, stop)
            yield Lease(epoch, start, stop)

    def commit(self, lease: Lease, version: int) -> None:
        """Record that the update to `version` consumed this lease, or a part of one."""
        epoch, start, stop = lease
        entry = self._epochs.get(epoch)
        if entry is None or not entry.out.take(start, stop):
            raise self._refusal(lease, version)
        entry.done.add(start, stop)
        entry.saw(version)

    def give_back(self, lease: Lease) -> None:
        """Return a lease, or the part of one that is not committed."""
        epoch, start, stop = lease
        entry = self._entry(epoch)
        if not entry.out.take(start, stop):
            raise LedgerError(f"{lease} is given back but was not out on lease")
        entry.free.add(start, stop)

    def give_back_all(self) -> None:
        """Return everything out on lease: those who held it are gone."""
        for entry in self._epochs.values():
            for start, stop in entry.out:
                entry.free.add(start, stop)
            entry.out.clear()

    def remaining(self, epoch: int) -> int:
        """How many samples of the epoch are not committed yet."""
        return self.proof(epoch).never

    def proof(self, epoch: int) -> Proof:
        entry = self._epochs.get(epoch)
        if entry is None:
            return Proof(self.samples, 0, 0, self.samples)
        done, twice = entry.done.total, entry.twice.total
        return Proof(self.samples, done - twice, twice, self.samples - done)

    def versions(self, epoch: int) -> tuple[int, int] | None:
        """The first and the last version that consumed something of the epoch."""
        entry = self._epochs.get(epoch)
        if entry is None or entry.first is None or entry.last is None:
            return None
        return entry.first, entry.last

    def state_dict(self) -> dict[str, Any]:
        """What was consumed, as plain JSON data. Leases do not outlive their holders."""
        return {
            "samples": self.samples,
            "epochs": [
                {
                    "epoch": number,
                    "versions": [entry.first, entry.last],
                    "done": [list(pair) for pair in entry.done],
                    "twice": [list(pair) for pair in entry.twice],
                }
                for number, entry in sorted(self._epochs.items())
                if entry.done
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state` says; whatever it does not say is free again."""
        if state["samples"] != self.samples:
            raise RunError(
                f"the run began with {state['samples']} training samples and the data now has "
                f"{self.samples}: resume with the data it began with"
            )
        self._epochs = {saved["epoch"]: self._restored(saved) for saved in state["epochs"]}

    def _restored(self, saved: dict[str, Any]) -> _Epoch:
        entry = _Epoch(self.samples)
        entry.first, entry.last = saved["versions"]
        for start, stop in saved["done"]:
            if not entry.free.take(start, stop):
                raise CheckpointError(
                    f"ledger of epoch {saved['epoch']}: [{start}, {stop}) overlaps another range "
                    f"or is not within [0, {self.samples})"
                )
            entry.done.add(start, stop)
        for start, stop in saved["twice"]:
            entry.twice.add(start, stop)
        return entry

    def _entry(self, epoch: int) -> _Epoch:
        entry = self._epochs.get(epoch)
        if entry is None:
            entry = self._epochs[epoch] = _Epoch(self.samples)
        return entry

    def _refusal(self, lease: Lease, version: int) -> LedgerError:
        """What to say. That samples were consumed again has happened, so it is recorded too."""
        epoch, start, stop = lease
        entry = self._entry(epoch)
        again = entry.done.common(start, stop)
        if not again:
            return LedgerError(f"{lease} is committed but was not out on lease")
        for first, last in again:
            entry.twice.add(first, last)
        entry.done.add(start, stop)
        entry.out.remove(start, stop)
        entry.free.remove(start, stop)
        entry.saw(version)
        count = sum(last - first for first, last in again)
        return LedgerError(f"{count} samples of {lease} are committed a second time")
