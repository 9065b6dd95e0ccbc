"""Leases from the coordinator: held, used, given back, and reported by the first member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.core.errors import PeerError
from echelon.core.types import Lease
from echelon.data.ledger import Ledger, LedgerError
from echelon.loop.leased_ledger import HELD, SharedLedger

SAMPLES = 1000


class Office:
    """Hands out what is asked for, from the front."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.generation = index, 1
        self.pace: float | None = None
        self.next = 0
        self.asked: list[tuple[int, int, list[tuple[int, int]]]] = []
        self.opened: list[int] = []
        self.on_record = 0

    def lease(
        self, epoch: int, wanted: int, unit: int, used: Sequence[tuple[int, int]]
    ) -> list[Lease]:
        self.asked.append((wanted, unit, list(used)))
        start, self.next = self.next, min(self.next + wanted, SAMPLES)
        return [Lease(epoch, start, self.next)] if start < self.next else []

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None:
        assert ledger["samples"] == SAMPLES
        self.opened.append(version)

    def recorded(self) -> int:
        return self.on_record


class Servers:
    """Have consumed what they say."""

    def __init__(self) -> None:
        self.share, self.pace = 0, 0.5
        self.ledger = Ledger(SAMPLES)
        self.records: list[tuple[int, ...]] = []
        self.left_out: list[Lease] = []
        self.reached = True

    def consumed(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def unheard(self, version: int) -> list[tuple[int, ...]]:
        if not self.reached:
            raise PeerError("nobody answers")
        return [record for record in self.records if record[3] > version]

    def leave_out(self, lease: Lease) -> None:
        self.left_out.append(lease)


def made(index: int = 0) -> SimpleNamespace:
    office, servers = Office(index), Servers()
    return SimpleNamespace(
        office=office, servers=servers, ledger=SharedLedger(SAMPLES, office, cast(Any, servers))
    )


def test_a_member_works_through_what_it_holds_and_asks_for_more_when_that_is_done() -> None:
    here = made()
    leases = list(here.ledger.leases(0, 30))
    assert [lease.size for lease in leases] == [30] * HELD
    for lease in leases[:-1]:
        here.ledger.commit(lease, 1)
    here.ledger.give_back_all()
    assert list(here.ledger.leases(0, 30)) == leases[-1:], "the last one again, and no other"
    here.ledger.commit(leases[-1], 2)
    more = next(here.ledger.leases(0, 30))
    assert more.start == leases[-1].stop
    wanted, unit, used = here.office.asked[-1]
    assert (wanted, unit, len(used), here.office.pace) == (HELD * 30, 30, HELD, 0.5)


def test_nothing_left_to_hold_is_a_reason_to_meet() -> None:
    here = made()
    here.office.next = SAMPLES
    assert not list(here.ledger.leases(0, 30))
    assert here.ledger.dry
    here.servers.ledger.take_in(Lease(0, 0, SAMPLES), 4)
    here.ledger.meet()
    assert not here.ledger.dry
    assert (here.ledger.remaining(0), here.ledger.consumed()) == (0, SAMPLES)


def test_the_servers_say_how_large_a_batch_is() -> None:
    here = made()
    here.servers.share = 7
    assert next(here.ledger.leases(0, 30)).size == 7


def test_a_new_generation_holds_nothing_and_goes_by_what_the_servers_know() -> None:
    here = made()
    next(here.ledger.leases(0, 30))
    here.servers.ledger.take_in(Lease(0, 0, 30), 1)
    here.ledger.open(1)
    assert here.office.opened == [1]
    assert here.ledger.remaining(0) == SAMPLES - 30
    with pytest.raises(LedgerError, match="was not out on lease"):
        here.ledger.commit(Lease(0, 0, 30), 1)
    with pytest.raises(LedgerError, match="given back but was not out"):
        here.ledger.give_back(Lease(0, 0, 30))


def test_the_first_member_reports_each_record_once_until_it_is_on_record() -> None:
    here = made()
    here.servers.records = [(0, 0, 30, 1, 0), (0, 60, 90, 2, -2)]
    assert here.ledger.drain() == [[0, 0, 30, 1, 1, 0], [0, 60, 90, 3, 2]]
    assert here.ledger.drain() == []
    here.servers.records.append((0, 30, 60, 3, 1))
    here.servers.reached = False
    assert here.ledger.drain() == []
    here.servers.reached = True
    assert here.ledger.drain() == [[0, 30, 60, 3, 3, 1]]
    assert made(index=1).ledger.drain() == []


def test_what_was_told_by_one_that_was_given_up_is_told_again_in_the_next_generation() -> None:
    here = made()
    here.servers.records = [(0, 0, 30, 1, 0), (0, 60, 90, 1, -2)]
    told = here.ledger.drain()
    assert here.ledger.drain() == []
    here.office.generation = 2  # nothing is on record, and a checkpoint is due before anything else
    here.servers.records.append((0, 30, 60, 2, 0))
    assert here.ledger.drain() == [*told, [0, 30, 60, 2, 2, 0]]
    assert here.ledger.drain() == []


def test_after_going_back_versions_are_told_anew() -> None:
    here = made()
    here.servers.records = [(0, 0, 30, 8, 0)]
    here.ledger.drain()
    here.servers.records = [(0, 0, 30, 5, 0)]
    here.ledger.open(4)
    assert here.ledger.drain() == [[0, 0, 30, 5, 5, 0]]


def test_samples_without_a_finite_update_are_the_servers_to_know() -> None:
    here = made()
    lease = next(here.ledger.leases(0, 30))
    here.ledger.leave_out(lease, 3)
    assert here.servers.left_out == [lease]
