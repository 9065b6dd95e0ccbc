"""Committed versions: which updates are journaled, each once and in order."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.protocol import BadFrame

Record = Sequence[int]
"""Epoch, start, stop, first, last: a range of the order and the versions its updates led to.

The updates of one record took equal parts of the range, except that the last may have been
smaller. A range that was consumed without an update has first = last + 1.
A sixth number is the member that did it alone: then first = last, and other ranges may be part of
the same update.
"""


_FIELDS = ("epoch", "start", "stop", "first", "last", "member")


class MissingRecords(BadFrame):
    """Updates were made of which nobody told: the proof would have a hole."""


class Versions:
    """The last version on record, and how long recovering took."""

    def __init__(self, outbox: Outbox, samples: int, batch_size: int | None = None) -> None:
        self.recorded = 0
        self.batch_size = batch_size
        self.news = 0
        """Counts what was new, be it many versions at once."""
        self.last_commit: float | None = None
        """When."""
        self.usual: float | None = None
        """Seconds between two versions."""
        self._samples = samples
        self._outbox = outbox
        self._left_out: set[tuple[int, int]] = set()
        """Ranges left out since the last update: resent ones are known by them."""
        self._alone: set[tuple[int, int]] = set()
        """The same of ranges that members brought to the last update, each its own."""
        self._rolled_back_in = 0
        self._wounded: float | None = None
        """Since when a loss is not made good."""
        self._healed_in: int | None = None
        """The first generation after it."""
        self._lost_steps = 0
        self._fresh = True
        """Whether the next update is the first of its generation: it takes longer than usual."""

    def commit(self, now: float, generation: int, records: Sequence[Record], who: object) -> bool:
        """Record what is not yet on record; returns whether anything was new."""
        if generation < self._rolled_back_in:
            return False  # of a past that was taken back
        before, news = self.recorded, False
        for given in records:
            if (record := self._new(given, who)) is not None:
                news = True
                self.news += 1
                named = dict(zip(_FIELDS, record, strict=False))
                self._outbox.note("committed", generation=generation, **named)
        if self.recorded > before:
            self._timed(now, self.recorded - before, generation)
        return news

    def roll_back(self, now: float, generation: int, version: int, why: str) -> None:
        """Go on from `version`, which may also be where a resumed run begins."""
        if version == self.recorded and not self._left_out:
            return  # nothing is taken back
        self._lost_steps += max(0, self.recorded - version)
        self.restore(version, generation)
        self.last_commit = now
        self._outbox.note("rolled_back", generation=generation, version=version, why=why)

    def restore(self, version: int, rolled_back_in: int | None = None) -> None:
        """Be at this version, to which all was rolled back in that generation if in any."""
        if version != self.recorded:
            self._alone.clear()
        self.recorded = version
        self._left_out.clear()
        if rolled_back_in is not None:
            self._rolled_back_in = rolled_back_in

    def left_out(self, epoch: int, start: int) -> None:
        """A range that was consumed without an update is on record."""
        self._left_out.add((epoch, start))

    def made_alone(self, epoch: int, start: int) -> None:
        """A range that a member brought to the last update is on record."""
        self._alone.add((epoch, start))

    def wounded(self, now: float) -> None:
        """A member of a generation was lost."""
        if self._wounded is None:
            self._wounded, self._lost_steps = now, 0
        self._healed_in = None

    def formed(self, now: float, generation: int) -> None:
        """A generation begins: whoever waits for updates waits from now on."""
        self.last_commit = now
        self._fresh = True
        if self._healed_in is None:
            self._healed_in = generation

    def _new(self, record: Record, who: object) -> Record | None:
        """What of it is not on record; it is from now on."""
        epoch, start, stop, first, last, *member = record
        if stop > self._samples:
            raise BadFrame(f"a record ends at {stop:,}, and an epoch has {self._samples:,} samples")
        if first > self.recorded + 1:
            raise MissingRecords(
                f"{who} recorded version {first:,} after version {self.recorded:,}: the records "
                "between are missing"
            )
        if member:
            return self._alone_once(record)
        if last < first:
            return self._left_out_once(record)
        if last <= self.recorded:
            return None
        if first <= self.recorded:
            start, first = self._cut(record), self.recorded + 1
        self.recorded = last
        self._left_out.clear()
        return epoch, start, stop, first, last

    def _alone_once(self, record: Record) -> Record | None:
        epoch, start, _, first, last, _ = record
        if first != last:
            raise BadFrame(f"one member alone made updates {first:,} to {last:,} in one record")
        if last < self.recorded or (last == self.recorded and (epoch, start) in self._alone):
            return None
        if last > self.recorded:
            self.restore(last)
        self.made_alone(epoch, start)
        return record

    def _left_out_once(self, record: Record) -> Record | None:
        epoch, start, _, first, _ = record
        if first <= self.recorded or (epoch, start) in self._left_out:
            return None
        self.left_out(epoch, start)
        return record

    def _cut(self, record: Record) -> int:
        """Where the part of a record begins that is not on record."""
        _, start, stop, first, last = record
        known, count = self.recorded - first + 1, last - first + 1
        size = self.batch_size
        if size is None and (stop - start) % count == 0:
            size = (stop - start) // count
        if size is None or start + known * size >= stop:
            raise MissingRecords(
                f"a record of versions {first:,} to {last:,} cannot be cut at {self.recorded:,}"
            )
        return start + known * size

    def _timed(self, now: float, versions: int, generation: int) -> None:
        if self.last_commit is not None and not self._fresh:
            took = (now - self.last_commit) / versions
            self.usual = took if self.usual is None else self.usual + 0.2 * (took - self.usual)
        self.last_commit, self._fresh = now, False
        if self._wounded is not None and self._healed_in is not None:
            self._recovered(now, generation, self._wounded, self._healed_in)

    def _recovered(self, now: float, generation: int, since: float, healed_in: int) -> None:
        """Unless the update was made before the loss and only told after it."""
        if generation >= healed_in:
            seconds = round(now - since, 3)
            lost = self._lost_steps
            self._outbox.note("recovered", generation=generation, seconds=seconds, lost_steps=lost)
            self._wounded = None
