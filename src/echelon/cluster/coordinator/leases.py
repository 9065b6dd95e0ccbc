"""Leases: which range of the order each trainer holds, and which are done.

    member ──▶ lease {epoch, wanted, unit, used}      member ◀── leased {ranges, left}

A request says how much the member wants to hold in total, and the answer lists everything it holds.
So a request can be repeated: if the answer was lost with its connection, the second request hands
out nothing twice. What is done becomes known twice: at once through `used` of the next request, so
that the member gets more, and finally through the records of updates (`Leases.applied`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.membership import Member, Roster, Speeds
from echelon.cluster.coordinator.protocol import BadFrame, Message
from echelon.core.types import Lease
from echelon.data.intervals import Intervals

MOST = 4
"""The fastest trainer gets at most this many times what it wanted."""
LEAST = 8
"""No trainer gets less than this fraction (1/8) of what it wanted."""


class LedgerDesk:
    """Handles the frames about leases, from strategies whose members do not move in lockstep.

    Every change is journaled before it is answered.
    """

    def __init__(self, leases: Leases, roster: Roster, outbox: Outbox) -> None:
        self.speeds = Speeds(roster)
        self._leases, self._outbox = leases, outbox

    def open(self, _now: float, _member: Member, message: Message) -> None:
        """Take over the leader's ledger of consumed ranges. All leases become void."""
        version, ledger = message["version"], message["ledger"]
        if ledger["samples"] != self._leases.samples:
            raise BadFrame(f"a ledger of {ledger['samples']:,} samples per epoch")
        self._leases.restore(ledger)
        self._outbox.note("ledger", version=version, ledger=ledger)

    def lease(self, _now: float, member: Member, message: Message) -> None:
        epoch, speed = message["epoch"], self.speeds.of(member)
        self._leases.used(member.id, epoch, message.get("used") or ())
        all_, unit = self.speeds.sum_with(speed), message.get("unit") or 1
        new = self._leases.lease(member.id, epoch, message["wanted"], speed, all_, unit)
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


class Leases:
    """Hands out the free positions of each epoch in ascending order, more to faster trainers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._pages: dict[int, Page] = {}
        self._whole: set[int] = set()
        """Epochs that are done as a whole."""

    def lease(
        self, member: int, epoch: int, wanted: int, speed: float, all_: float, unit: int = 1
    ) -> list[Lease]:
        """Hand out until `member` holds its share; return the new ranges.

        `speed` is the member's, relative to the mean; `all_` is the sum over all members. The new
        ranges add up to a multiple of `unit`, unless too little is free.
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

    def _due(self, page: Page, wanted: int, speed: float, all_: float) -> int:
        """Return how much a member should hold, in proportion to its speed.

        Near the end of the epoch that is no more than its share of what is free, so that the others
        do not wait for a slow member's last lease.
        """
        fair = min(MOST * wanted, round(wanted * speed))
        last = int(page.loose * speed / all_)
        return max(1, wanted // LEAST, min(fair, last))

    def holds(self, member: int, epoch: int) -> list[tuple[int, int]]:
        page = self._pages.get(epoch)
        return list(page.held.get(member, ())) if page else []

    def left(self, epoch: int) -> int:
        """Return how many samples of the epoch are not done."""
        if epoch in self._whole:
            return 0
        page = self._pages.get(epoch)
        return page.left if page else self.samples

    def take(self, member: int, lease: Lease) -> bool:
        """Hand out exactly this range, as the journal says; return whether it was free."""
        epoch, start, stop = lease
        page = self._page(epoch)
        if page is None or not page.free.take(start, stop):
            return False
        page.loose -= stop - start
        page.held.setdefault(member, Intervals()).add(start, stop)
        return True

    def applied(self, lease: Lease) -> None:
        """Mark a range as done by a journaled update, even if another member holds it by now."""
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
        """Mark ranges that this member has finished; its record of the update is still to come."""
        page = self._pages.get(epoch)
        if page is None:
            return
        for start, stop in ranges:
            if self._released(page, member, Lease(epoch, start, stop)):
                self._consume(page, start, stop)

    def give_back_all(self, member: int) -> None:
        """Free all that a lost member held, so that it is handed out next."""
        for page in self._pages.values():
            for start, stop in page.held.pop(member, ()):
                page.free.add(start, stop)
                page.loose += stop - start

    def restore(self, ledger: Mapping[str, Any]) -> None:
        """Take over a ledger's state. All leases become void."""
        self._whole = {epoch for epoch, *_ in ledger["whole"]}
        self._pages = {}
        for saved in ledger["parts"]:
            page = self._page(saved["epoch"])
            assert page is not None, f"epoch {saved['epoch']} is both whole and in parts"
            for start, stop in saved["done"]:
                self._consume(page, start, stop)

    def owners(self) -> Iterable[tuple[int, Lease]]:
        """Yield every lease with its holder."""
        for epoch, page in self._pages.items():
            for member, held in page.held.items():
                yield from ((member, Lease(epoch, *pair)) for pair in held)

    def _page(self, epoch: int) -> Page | None:
        """Return the epoch's page; None if the epoch is done."""
        if epoch in self._whole:
            return None
        if epoch not in self._pages:
            self._pages[epoch] = Page(self.samples)
        return self._pages[epoch]

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


class Page:
    """The state of one epoch: every position is free, held by one trainer, or done."""

    __slots__ = ("done", "free", "held", "left", "loose")

    def __init__(self, samples: int) -> None:
        self.free = Intervals([(0, samples)])
        self.done = Intervals()
        self.held: dict[int, Intervals] = {}
        self.loose = samples
        """Number of free positions, kept because counting them each time takes longer."""
        self.left = samples
        """Number of positions that are not done."""
