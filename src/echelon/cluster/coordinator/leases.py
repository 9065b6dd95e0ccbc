"""Leases, committed versions.

The distributed ledger: which trainer holds which range, and what is done.

Who asks says how much it wants to hold in all, and the answer is all that it holds: asked twice,
because an answer was lost with its connection, nothing is handed out twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def give_back_all(self, member: int) -> None:
        """Free all that a lost member held, so that it is handed out next."""
        for page in self._pages.values():
            for start, stop in page.held.pop(member, ()):
                page.free.add(start, stop)
                page.loose += stop - start

    def owners(self) -> Iterable[tuple[int, Lease]]:
        """Every lease that is out, with its holder."""
        for epoch, page in self._pages.items():
            for member, held in page.held.items():
                yield from ((member, Lease(epoch, *pair)) for pair in held)

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

    def __init__(self, leases: Leases, roster: Roster, outbox: Outbox) -> None:
        self.speeds = Speeds(roster)
        self._leases, self._outbox = leases, outbox

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


# --- versions ---
# Which updates are on record: each once, one after the other.
