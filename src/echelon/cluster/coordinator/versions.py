"""Committed versions: which updates are journaled, each exactly once and in order.

Members report records of the updates they made, and report them again when in doubt: after a
reconnection, or when the leader that should have reported them is lost. `Versions.commit` writes
the part that is new to the journal and refuses a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.protocol import BadFrame

Record = Sequence[int]
"""Epoch, start, stop, first, last: a range of the order and the versions that its updates produced.

The updates of one record consumed equal parts of the range, except that the last part may be
smaller. A range that was consumed without an update has first = last + 1.
A sixth number is the member that computed the range alone, with a strategy whose members do not
move in lockstep: then first = last, and other ranges may belong to the same update.
"""
_FIELDS = ("epoch", "start", "stop", "first", "last", "member")


class MissingRecords(BadFrame):
    """Updates were made but never reported: the exactly-once proof would have a gap."""


class Versions:
    """The last journaled version, and how long recoveries took."""

    def __init__(self, outbox: Outbox, samples: int, batch_size: int | None = None) -> None:
        self.recorded = 0
        self.batch_size = batch_size
        self.news = 0
        """Number of new records so far, whatever their number of versions."""
        self.last_commit: float | None = None
        """When the last version was journaled, rolled back to, or a generation formed."""
        self.usual: float | None = None
        """Moving average of the seconds between two versions."""
        self._samples = samples
        self._outbox = outbox
        self._left_out: set[tuple[int, int]] = set()
        """(epoch, start) of ranges consumed without an update since the last one, to recognize them
        when they are reported again."""
        self._alone: set[tuple[int, int]] = set()
        """(epoch, start) of ranges that members contributed to the last update alone, likewise."""
        self._rolled_back_in = 0
        """The generation that rolled back last: records of earlier ones are void."""
        self._wounded: float | None = None
        """When a member was lost, until the run has recovered."""
        self._healed_in: int | None = None
        """The first generation after that loss."""
        self._lost_steps = 0
        self._fresh = True
        """Whether the next update is the first of its generation: it takes longer than usual."""

    def commit(self, now: float, generation: int, records: Sequence[Record], who: object) -> bool:
        """Journal what is new in these records; return whether anything was. `who` reports them."""
        if generation < self._rolled_back_in:
            return False  # these updates were rolled back
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

    def _new(self, record: Record, who: object) -> Record | None:
        """Return the part of a record that is new, or None, and count it as journaled."""
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

    def _cut(self, record: Record) -> int:
        """Return the position at which the new part of a record begins."""
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

    def roll_back(self, now: float, generation: int, version: int, why: str) -> None:
        """Continue from `version`, which may also be where a resumed run begins."""
        if version == self.recorded and not self._left_out:
            return  # nothing to undo
        self._lost_steps += max(0, self.recorded - version)
        self.restore(version, generation)
        self.last_commit = now
        self._outbox.note("rolled_back", generation=generation, version=version, why=why)

    def restore(self, version: int, rolled_back_in: int | None = None) -> None:
        """Set the last version; `rolled_back_in`: the generation that rolled back to it, if any."""
        if version != self.recorded:
            self._alone.clear()
        self.recorded = version
        self._left_out.clear()
        if rolled_back_in is not None:
            self._rolled_back_in = rolled_back_in

    def left_out(self, epoch: int, start: int) -> None:
        """Note a journaled range that was consumed without an update."""
        self._left_out.add((epoch, start))

    def made_alone(self, epoch: int, start: int) -> None:
        """Note a journaled range that one member contributed to the last update."""
        self._alone.add((epoch, start))

    def wounded(self, now: float) -> None:
        """Note that a member of a generation was lost: recovery is timed from the first loss."""
        if self._wounded is None:
            self._wounded, self._lost_steps = now, 0
        self._healed_in = None

    def formed(self, now: float, generation: int) -> None:
        """Note that a generation begins: waiting for its first update is timed from now on."""
        self.last_commit = now
        self._fresh = True
        if self._healed_in is None:
            self._healed_in = generation

    def _timed(self, now: float, versions: int, generation: int) -> None:
        if self.last_commit is not None and not self._fresh:
            took = (now - self.last_commit) / versions
            self.usual = took if self.usual is None else self.usual + 0.2 * (took - self.usual)
        self.last_commit, self._fresh = now, False
        if self._wounded is not None and self._healed_in is not None:
            self._recovered(now, generation, self._wounded, self._healed_in)

    def _recovered(self, now: float, generation: int, since: float, healed_in: int) -> None:
        """Journal the recovery, unless the update was made before the loss and reported late."""
        if generation >= healed_in:
            seconds = round(now - since, 3)
            lost = self._lost_steps
            self._outbox.note("recovered", generation=generation, seconds=seconds, lost_steps=lost)
            self._wounded = None
