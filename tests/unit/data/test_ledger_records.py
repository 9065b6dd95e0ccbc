"""The ledger's records for a journal are few and cover every commit."""

from __future__ import annotations

import pytest

from echelon.core.types import Lease
from echelon.data.ledger import Ledger, LedgerError, Record, after


def committed(ledger: Ledger, epoch: int, size: int, version: int, count: int = 10**9) -> int:
    for _, lease in zip(range(count), ledger.leases(epoch, size), strict=False):
        version += 1
        ledger.commit(lease, version)
    ledger.give_back_all()
    return version


def test_commits_that_follow_one_another_are_one_record() -> None:
    ledger = Ledger(100)
    committed(ledger, 0, 8, 0)
    assert ledger.drain() == [Record(0, 0, 100, 1, 13)]
    assert ledger.drain() == []


def test_a_drained_record_is_not_grown() -> None:
    ledger = Ledger(100)
    version = committed(ledger, 0, 10, 0, count=3)
    first = ledger.drain()
    committed(ledger, 0, 10, version)
    assert (first, ledger.drain()) == ([(0, 0, 30, 1, 3)], [(0, 30, 100, 4, 10)])


def test_another_epoch_version_or_place_opens_a_record() -> None:
    ledger = Ledger(10)
    version = committed(ledger, 0, 5, 0)
    version = committed(ledger, 1, 5, version, count=1)
    ledger.commit(next(ledger.leases(1, 2)), version + 7)
    leases = list(ledger.leases(2, 3))
    for version, lease in zip((11, 12, 13), (leases[0], leases[2], leases[1]), strict=True):
        ledger.commit(lease, version)
    assert ledger.drain() == [
        (0, 0, 10, 1, 2),
        (1, 0, 5, 3, 3),
        (1, 5, 7, 10, 10),
        (2, 0, 3, 11, 11),
        (2, 6, 9, 12, 12),
        (2, 3, 6, 13, 13),
    ]


def test_the_same_range_of_the_next_epoch_does_not_grow_the_record_of_this_one() -> None:
    ledger = Ledger(10)
    ledger.commit(next(ledger.leases(0, 5)), 1)
    list(ledger.leases(1, 5))
    ledger.commit(Lease(1, 5, 10), 2)
    assert ledger.drain() == [(0, 0, 5, 1, 1), (1, 5, 10, 2, 2)]


def test_what_is_left_out_is_consumed_without_an_update() -> None:
    ledger = Ledger(40)
    leases = ledger.leases(0, 10)
    ledger.commit(next(leases), 1)
    ledger.leave_out(next(leases), 1)
    ledger.commit(next(leases), 2)
    ledger.commit(next(leases), 3)
    records = ledger.drain()
    assert records == [(0, 0, 10, 1, 1), (0, 10, 20, 2, 1), (0, 20, 40, 2, 3)]
    assert [record.left_out for record in records] == [False, True, False]
    assert ledger.proof(0).once == 40


def test_only_what_is_out_can_be_left_out() -> None:
    ledger = Ledger(10)
    with pytest.raises(LedgerError, match="is left out but was not out on lease"):
        ledger.leave_out(Lease(0, 0, 5), 3)
    assert ledger.drain() == []


def test_a_second_commit_is_recorded_too() -> None:
    ledger = Ledger(10)
    lease = next(ledger.leases(0, 5))
    ledger.commit(lease, 1)
    with pytest.raises(LedgerError, match="a second time"):
        ledger.commit(lease, 2)
    assert ledger.drain() == [(0, 0, 5, 1, 1), (0, 0, 5, 2, 2)]


def test_going_back_forgets_what_was_not_drained() -> None:
    ledger = Ledger(100)
    version = committed(ledger, 0, 10, 0, count=2)
    state = ledger.state_dict()
    ledger.drain()
    committed(ledger, 0, 10, version, count=3)
    ledger.load_state_dict(state)
    assert ledger.drain() == []
    committed(ledger, 0, 10, version, count=1)
    assert ledger.drain() == [(0, 20, 30, 3, 3)]


def test_a_record_can_be_cut_at_a_version() -> None:
    record = Record(2, 40, 95, 11, 16)  # leases of 10, the last of 5
    for version in range(9, 18):
        done, rest = record.until(version, 10), record.after(version, 10)
        assert sum(part.samples for part in (done, rest) if part) == 55
        if done and rest:
            assert (done.last, rest.first) == (version, version + 1)
            assert done.stop == rest.start == 40 + (version - 10) * 10
    assert (record.until(10, 10), record.after(16, 10)) == (None, None)
    assert record.until(16, 10) == record.after(10, 10) == record


def test_what_is_known_already_is_cut_off() -> None:
    records = [Record(0, 0, 30, 1, 3), Record(0, 30, 40, 4, 3), Record(0, 40, 70, 4, 6)]
    assert after(records, 5, 10) == [(0, 60, 70, 6, 6)]
    assert after(records, 3, 10) == records[1:]
    assert after(records, 0, 10) == records
    assert after(records, 6, 10) == []
