"""Leases, committed versions.

The distributed ledger: which trainer holds which range, and what is done.

Who asks says how much it wants to hold in all, and the answer is all that it holds: asked twice,
because an answer was lost with its connection, nothing is handed out twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.membership import Member, Roster, Speeds
from echelon.cluster.coordinator.protocol import BadFrame, Message
from echelon.core.types import Lease
from echelon.data.intervals import Intervals

# --- leases ---

MOST = 4
"""Times what it wanted that the fastest trainer gets."""
LEAST = 8
"""The part of what it wanted, one in so many, below which ranges are not divided further."""


class Page:
    """One epoch. Every position is free, held by one trainer, or done."""

    __slots__ = ("done", "free", "held", "left", "loose")

    def __init__(self, samples: int) -> None:
        self.free = Intervals([(0, samples)])
        self.done = Intervals()
        self.held: dict[int, Intervals] = {}
        self.loose = samples
        """How many positions are free: counting them each time would take longer."""
        self.left = samples
        """How many are not done."""


class Leases:
    """Whatever is not done goes to whoever asks, in ascending order, more to the faster."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._pages: dict[int, Page] = {}
        self._whole: set[int] = set()
        """Epochs that are done."""

    def lease(
        self, member: int, epoch: int, wanted: int, speed: float, all_: float, unit: int = 1
    ) -> list[Lease]:
        """Hand out until `member` holds what it should; returns what is new.

        `speed` is its own in relation to the usual one, `all_` the sum over everybody. What is
        handed out is a multiple of `unit`, as far as what is free goes.
        """
        page = self._page(epoch)
        if page is None:
            return []
        held = page.held.setdefault(member, Intervals())
        due = self._due(page, wanted, speed, all_) - held.total
        due += -due % unit
        new = []
        while due > 0 and page.free:
            start, stop = page.free.pop(due)
            held.add(start, stop)
            page.loose -= stop - start
            due -= stop - start
            new.append(Lease(epoch, start, stop))
        return new

    def holds(self, member: int, epoch: int) -> list[tuple[int, int]]:
        page = self._pages.get(epoch)
        return list(page.held.get(member, ())) if page else []

    def left(self, epoch: int) -> int:
        """How many samples of the epoch are not committed."""
        if epoch in self._whole:
            return 0
        page = self._pages.get(epoch)
        return page.left if page else self.samples

    def take(self, member: int, lease: Lease) -> bool:
        """Hand out exactly this, as it was before; says whether it was free."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if page is None or not page.free.take(start, stop):
            return False
        page.loose -= stop - start
        page.held.setdefault(member, Intervals()).add(start, stop)
        return True

    def commit(self, member: int, lease: Lease) -> bool:
        """Done, by whom it was held; says whether it was."""
        page = self._pages.get(lease.epoch)
        if page is None or not self._released(page, member, lease):
            return False
        page.done.add(lease.start, lease.stop)
        page.left -= lease.size
        if page.left == 0:
            del self._pages[lease.epoch]
            self._whole.add(lease.epoch)
        return True

    def restore(self, ledger: Mapping[str, Any]) -> None:
        """Be as a ledger says: nobody holds anything."""
        self._whole = {epoch for epoch, *_ in ledger["whole"]}
        self._pages = {}
        for saved in ledger["parts"]:
            page = self._page(saved["epoch"])
            assert page is not None, f"epoch {saved['epoch']} is both whole and in parts"
            for start, stop in saved["done"]:
                self._consume(page, start, stop)

    def applied(self, lease: Lease) -> None:
        """Done, whoever holds it or has given it back."""
        page = self._page(lease.epoch)
        if page is None:
            return
        for held in page.held.values():
            held.remove(lease.start, lease.stop)
        self._consume(page, lease.start, lease.stop)
        if page.left == 0:
            del self._pages[lease.epoch]
            self._whole.add(lease.epoch)

    def used(self, member: int, epoch: int, ranges: Iterable[Sequence[int]]) -> None:
        """This member is done with these: another word will say that they were applied."""
        page = self._pages.get(epoch)
        if page is None:
            return
        for start, stop in ranges:
            if self._released(page, member, Lease(epoch, start, stop)):
                self._consume(page, start, stop)

    def is_done(self, lease: Lease) -> bool:
        """Whether all of it is committed, by whomever."""
        epoch, start, stop = lease
        page = self._pages.get(epoch)
        if page is None:
            return epoch in self._whole and stop <= self.samples
        return page.done.overlap(start, stop) == stop - start

    def give_back(self, member: int, lease: Lease) -> bool:
        """Free again, before all that comes after it; says whether it was held."""
        page = self._pages.get(lease.epoch)
        if page is None or not self._released(page, member, lease):
            return False
        page.free.add(lease.start, lease.stop)
        page.loose += lease.size
        return True

    def give_back_all(self, member: int) -> list[Lease]:
        """A member is gone: what it held goes to others."""
        found = [Lease(epoch, *pair) for epoch, pair in self._held_by(member)]
        for lease in found:
            self.give_back(member, lease)
        for page in self._pages.values():
            page.held.pop(member, None)
        return found

    def owners(self) -> Iterable[tuple[int, Lease]]:
        """Every lease that is out, with its holder."""
        for epoch, page in self._pages.items():
            for member, held in page.held.items():
                yield from ((member, Lease(epoch, *pair)) for pair in held)

    def _held_by(self, member: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for epoch, page in self._pages.items():
            for pair in page.held.get(member, ()):
                yield epoch, pair

    def _page(self, epoch: int) -> Page | None:
        """None for an epoch that is done."""
        if epoch in self._whole:
            return None
        if epoch not in self._pages:
            self._pages[epoch] = Page(self.samples)
        return self._pages[epoch]

    def _due(self, page: Page, wanted: int, speed: float, all_: float) -> int:
        """In proportion to its speed; towards the end no more than its part of what is free, so
        that nobody waits for the slowest one's last lease."""
        fair = min(MOST * wanted, round(wanted * speed))
        last = int(page.loose * speed / all_)
        return max(1, wanted // LEAST, min(fair, last))

    @staticmethod
    def _consume(page: Page, start: int, stop: int) -> None:
        page.left -= stop - start - page.done.overlap(start, stop)
        page.loose -= page.free.overlap(start, stop)
        page.free.remove(start, stop)
        page.done.add(start, stop)

    @staticmethod
    def _released(page: Page, member: int, lease: Lease) -> bool:
        held = page.held.get(member)
        return held is not None and held.take(lease.start, lease.stop)


# --- ledger ---
# Leases as they are asked for over the wire, by trainers that do not wait for each other.


class LedgerDesk:
    """Hands out, records, takes back; every change is in the journal before it is answered."""

    def __init__(self, leases: Leases, versions: Versions, roster: Roster, outbox: Outbox) -> None:
        self.speeds = Speeds(roster)
        self._leases, self._versions, self._outbox = leases, versions, outbox

    def open(self, _now: float, _member: Member, message: Message) -> None:
        """What is consumed, from whom it is known best; whatever anybody holds is void."""
        version, ledger = message["version"], message["ledger"]
        if ledger["samples"] != self._leases.samples:
            raise BadFrame(f"a ledger of {ledger['samples']:,} samples per epoch")
        self._leases.restore(ledger)
        self._outbox.note("ledger", version=version, ledger=ledger)

    def lease(self, _now: float, member: Member, message: Message) -> None:
        epoch, speed = message["epoch"], self.speeds.of(member)
        self._leases.used(member.id, epoch, message.get("used") or ())
        everybody, unit = self.speeds.sum_with(speed), message.get("unit") or 1
        new = self._leases.lease(member.id, epoch, message["wanted"], speed, everybody, unit)
        for _, start, stop in new:
            self._outbox.note("leased", member=member.id, epoch=epoch, start=start, stop=stop)
        self._outbox.send(
            member.id,
            "leased",
            epoch=epoch,
            ranges=self._leases.holds(member.id, epoch),
            left=self._leases.left(epoch),
            seq=message.get("seq"),
        )

    def commit(self, now: float, member: Member, message: Message) -> None:
        """What is done already, by whomever, stays done: a commit that is sent again is no news."""
        lease, version = self._range(message), message["version"]
        if self._leases.commit(member.id, lease):
            named = {"epoch": lease.epoch, "start": lease.start, "stop": lease.stop}
            both = {"first": version, "last": version}
            generation = member.generation
            self._outbox.note("committed", generation=generation, **named, **both, member=member.id)
            self._versions.updated(now, generation, version)
        elif not self._leases.is_done(lease):
            why = f"{member} does not hold [{lease.start}, {lease.stop}) of epoch {lease.epoch}"
            self._outbox.send(member.id, "refused", why=why, seq=message.get("seq"))

    def give_back(self, _now: float, member: Member, message: Message) -> None:
        lease = self._range(message)
        if self._leases.give_back(member.id, lease):
            named = {"epoch": lease.epoch, "start": lease.start, "stop": lease.stop}
            self._outbox.note("returned", member=member.id, **named)

    def _range(self, message: Message) -> Lease:
        lease = Lease(message["epoch"], message["start"], message["stop"])
        if lease.stop > self._leases.samples:
            raise BadFrame(f"{lease} ends after the epoch's {self._leases.samples:,} samples")
        return lease


# --- versions ---
# Which updates are on record: each once, one after the other.

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

    def updated(self, now: float, generation: int, version: int) -> None:
        """An asynchronous update: their versions may come to be known in any order."""
        self.news += 1
        ahead = version - self.recorded
        if ahead > 0:
            self.recorded = version
        self._timed(now, max(1, ahead), generation)

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
