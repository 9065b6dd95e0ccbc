"""Rebuild a coordinator's state from the journal that its predecessors wrote.

A coordinator that was killed and started again continues where the journal ends: it knows the
members, the current generation, the last version and all leases. Members whose connections broke
have a few seconds to connect again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from echelon.cluster.coordinator.coordinator import Desk
from echelon.cluster.coordinator.generations import Formation
from echelon.cluster.coordinator.membership import Member
from echelon.cluster.coordinator.protocol import Message
from echelon.core.errors import DataError
from echelon.core.types import Lease

Entry = Mapping[str, Any]


def replay(desk: Desk, past: Iterable[Entry], store: tuple[str, int], now: float) -> bool:
    """Bring a new desk to the state at the journal's end.

    Return whether this continues the work of a previous coordinator of the same start of the run.
    Entries of unknown kinds are skipped: they are written for others.
    """
    reader = _Reader(desk, store, now)
    for number, entry in enumerate(past, 1):
        try:
            reader.read(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"entry {number} of the journal ({entry.get('kind')!r}) does not fit what came "
                f"before it: {error}"
            ) from None
    for member in desk.roster:
        member.away = now
    if reader.again:
        desk.liveness.restarted = now
        desk.versions.formed(now, desk.generations.number)
        desk.generations.gone_on_with(now)
    return reader.again


class _Reader:
    """Applies one entry after the other to the desk."""

    def __init__(self, desk: Desk, store: tuple[str, int], now: float) -> None:
        self.again = False
        self._desk, self._store, self._now = desk, store, now
        self._people: dict[int, Message] = {}
        self._kinds: dict[str, Callable[[Entry], None]] = {
            "begun": self._begun,
            "coordinator": self._coordinator,
            "joined": self._joined,
            "lost": self._lost,
            "generation": self._generation,
            "committed": self._committed,
            "rolled_back": self._rolled_back,
            "ledger": self._ledger,
            "leased": self._leased,
            "over": self._over,
            "finished": self._finished,
        }

    def read(self, entry: Entry) -> None:
        kind = self._kinds.get(entry["kind"])
        if kind is not None:
            kind(entry)

    def _begun(self, entry: Entry) -> None:
        """Begin a run, or resume one: former members are gone, what they did stays done."""
        desk, self.again = self._desk, False
        for member in list(desk.roster):
            self._gone(member.id, "the run was begun again")
        desk.roster.gone.clear()
        desk.generations.begin(desk.generations.number)
        desk.versions.batch_size = entry.get("batch_size")

    def _coordinator(self, _entry: Entry) -> None:
        self.again = True

    def _joined(self, entry: Entry) -> None:
        member = Member(
            id=entry["member"],
            pid=entry["pid"],
            host=entry["host"],
            name=entry["name"],
            number=entry.get("number"),
            local=entry["host"] == self._desk.entrance.here,
        )
        self._people[member.id] = member.public()
        self._desk.entrance.admit(self._now, member)

    def _lost(self, entry: Entry) -> None:
        member = self._desk.roster.get(entry["member"])
        if member is not None:
            self._desk.gave_up(self._now, member, entry.get("how", ""))
        self._gone(entry["member"], entry["why"])

    def _gone(self, id_: int, why: str) -> None:
        member = self._desk.roster.get(id_)
        if member is not None:
            self._desk.roster.remove(member, why)
            self._desk.leases.give_back_all(id_)

    def _generation(self, entry: Entry) -> None:
        people = [self._people[member] for member in entry["members"]]
        number, behind = entry["number"], list(entry.get("behind", ()))
        self._desk.generations.restore(
            Formation(
                number,
                people,
                entry.get("source"),
                behind,
                entry.get("anew", False),
                entry["version"],
                self._store,
            )
        )
        for id_ in entry["members"]:
            member = self._desk.roster.get(id_)
            if member is not None:
                member.generation = number

    def _committed(self, entry: Entry) -> None:
        versions, last = self._desk.versions, entry["last"]
        if "member" in entry:
            self._desk.leases.applied(_lease(entry))
            versions.restore(max(versions.recorded, last))
            versions.made_alone(entry["epoch"], entry["start"])
        elif last < entry["first"]:
            versions.left_out(entry["epoch"], entry["start"])
        else:
            versions.restore(last)

    def _rolled_back(self, entry: Entry) -> None:
        self._desk.versions.restore(entry["version"], entry.get("generation", 0))

    def _ledger(self, entry: Entry) -> None:
        self._desk.leases.restore(entry["ledger"])

    def _leased(self, entry: Entry) -> None:
        if not self._desk.leases.take(entry["member"], _lease(entry)):
            raise ValueError(f"{_lease(entry)} is not free")

    def _over(self, entry: Entry) -> None:
        self._desk.generations.closing(entry["status"], entry.get("why"))

    def _finished(self, entry: Entry) -> None:
        self._desk.generations.finished(entry["status"], entry.get("why", entry["status"]))


def _lease(entry: Entry) -> Lease:
    return Lease(entry["epoch"], entry["start"], entry["stop"])
