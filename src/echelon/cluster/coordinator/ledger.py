"""Leases as they are asked for over the wire, by trainers that do not wait for each other."""

from __future__ import annotations

from echelon.cluster.coordinator.frames import BadFrame, Message
from echelon.cluster.coordinator.leases import Leases
from echelon.cluster.coordinator.outbox import Outbox
from echelon.cluster.coordinator.roster import Member, Roster
from echelon.cluster.coordinator.speeds import Speeds
from echelon.cluster.coordinator.versions import Versions
from echelon.core.types import Lease


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
