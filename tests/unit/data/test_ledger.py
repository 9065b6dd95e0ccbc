"""The ledger leases every position, takes leases back, and proves what was consumed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from echelon.core.errors import CheckpointError, RunError
from echelon.core.types import Lease
from echelon.data.ledger import Ledger, LedgerError, Proof


def spans(ledger: Ledger, epoch: int, size: int) -> list[tuple[int, int]]:
    return [(lease.start, lease.stop) for lease in ledger.leases(epoch, size)]


def consume(ledger: Ledger, epoch: int, size: int, version: int = 0) -> int:
    for lease in ledger.leases(epoch, size):
        version += 1
        ledger.commit(lease, version)
    return version


def test_leases_follow_one_another_and_the_last_is_short() -> None:
    assert spans(Ledger(10), 0, 4) == [(0, 4), (4, 8), (8, 10)]


def test_an_undisturbed_epoch_is_consumed_once() -> None:
    ledger = Ledger(1000)
    assert ledger.proof(0) == Proof(1000, once=0, twice=0, never=1000)
    assert ledger.versions(0) is None
    assert consume(ledger, 0, 32) == 32
    assert ledger.proof(0) == Proof(1000, once=1000, twice=0, never=0)
    assert ledger.remaining(0) == 0
    assert ledger.versions(0) == (1, 32)
    assert spans(ledger, 0, 32) == []


def test_a_returned_lease_comes_first_again() -> None:
    ledger = Ledger(100)
    leases = ledger.leases(0, 10)
    first, second = next(leases), next(leases)
    ledger.give_back(first)
    assert next(leases) == first
    ledger.commit(second, 1)
    assert next(leases) == Lease(0, 20, 30)
    assert ledger.remaining(0) == 90


def test_all_that_is_out_can_be_given_back() -> None:
    ledger = Ledger(100)
    leases = ledger.leases(3, 10)
    drawn = [next(leases) for _ in range(6)]
    for lease in drawn[:2]:
        ledger.commit(lease, 1)
    ledger.give_back_all()
    assert spans(ledger, 3, 10) == [(start, start + 10) for start in range(20, 100, 10)]


def test_a_lease_can_be_worked_off_in_parts() -> None:
    ledger = Ledger(100)
    lease = next(ledger.leases(0, 60))
    ledger.commit(lease._replace(stop=20), 1)
    ledger.commit(lease._replace(start=40), 2)
    ledger.give_back(lease._replace(start=20, stop=40))
    assert ledger.remaining(0) == 60
    assert spans(ledger, 0, 60) == [(20, 40), (60, 100)]


def test_epochs_have_pages_of_their_own() -> None:
    ledger = Ledger(10)
    zero, one = next(ledger.leases(0, 4)), next(ledger.leases(1, 4))
    ledger.commit(one, 8)
    ledger.commit(zero, 7)
    assert (ledger.versions(0), ledger.versions(1)) == ((7, 7), (8, 8))
    assert ledger.remaining(0) == ledger.remaining(1) == 6


def test_a_second_commit_is_refused_and_shows_in_the_proof() -> None:
    ledger = Ledger(100)
    lease = next(ledger.leases(0, 10))
    ledger.commit(lease, 1)
    with pytest.raises(LedgerError, match=r"10 samples of Lease\(.*\) are committed a second time"):
        ledger.commit(lease, 2)
    assert ledger.proof(0) == Proof(100, once=0, twice=10, never=90)
    assert ledger.versions(0) == (1, 2)


def test_what_an_overlapping_commit_adds_is_recorded_too() -> None:
    ledger = Ledger(100)
    leases = ledger.leases(0, 10)
    ledger.commit(next(leases), 1)
    next(leases)
    with pytest.raises(LedgerError, match=r"^10 samples of"):
        ledger.commit(Lease(0, 0, 30), 2)
    assert ledger.proof(0) == Proof(100, once=20, twice=10, never=70)
    assert spans(ledger, 0, 70) == [(30, 100)]


def test_a_second_commit_after_the_epoch_shows_in_the_proof() -> None:
    ledger = Ledger(20)
    version = consume(ledger, 0, 10)
    next(ledger.leases(1, 10))
    with pytest.raises(LedgerError, match="second time"):
        ledger.commit(Lease(0, 5, 15), version + 1)
    assert ledger.proof(0) == Proof(20, once=10, twice=10, never=0)
    assert Ledger.proof(restored(ledger), 0) == ledger.proof(0)


@pytest.mark.parametrize("lease", [Lease(0, 10, 20), Lease(0, 5, 15), Lease(7, 0, 10)])
def test_a_commit_without_a_lease_is_refused(lease: Lease) -> None:
    ledger = Ledger(100)
    next(ledger.leases(0, 10))
    with pytest.raises(LedgerError, match="is committed but was not out on lease"):
        ledger.commit(lease, 1)
    assert ledger.proof(0).never == 100


def test_a_return_without_a_lease_is_refused() -> None:
    with pytest.raises(LedgerError, match="is given back but was not out on lease"):
        Ledger(100).give_back(Lease(0, 0, 10))


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_checked(size: int) -> None:
    with pytest.raises(AssertionError, match=f"a lease of {size} samples"):
        next(Ledger(10).leases(0, size))
    with pytest.raises(AssertionError, match=f"a ledger of {size} samples"):
        Ledger(size)


def restored(ledger: Ledger) -> Ledger:
    other = Ledger(ledger.samples)
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    return other


def test_another_batch_size_goes_on_where_the_first_stopped() -> None:
    ledger = Ledger(100)
    consume(ledger, 0, 32)
    leases = ledger.leases(1, 32)
    ledger.commit(next(leases), 5)
    next(leases)  # out on lease when the run dies
    other = restored(ledger)
    assert other.proof(0) == Proof(100, 100, 0, 0)
    assert (other.versions(0), other.versions(1)) == ((1, 4), (5, 5))
    assert spans(other, 1, 20) == [(32, 52), (52, 72), (72, 92), (92, 100)]


def test_the_state_is_small_whatever_the_number_of_steps() -> None:
    ledger = Ledger(10**6)
    version = consume(ledger, 0, 10)
    leases = ledger.leases(1, 10)
    for _ in range(50_000):
        version += 1
        ledger.commit(next(leases), version)
    assert ledger.state_dict() == {
        "samples": 10**6,
        "whole": [[0, 1, 100_000]],
        "parts": [
            {"epoch": 1, "versions": [100_001, 150_000], "done": [[0, 500_000]], "twice": []}
        ],
    }


def test_other_data_is_refused_on_resume() -> None:
    state = Ledger(100).state_dict()
    with pytest.raises(RunError, match="began with 100 training samples and the data now has 90"):
        Ledger(90).load_state_dict(state)


@pytest.mark.parametrize("done", [[[0, 101]], [[0, 10], [5, 20]]])
def test_a_state_that_cannot_be_is_refused(done: list[Any]) -> None:
    page = {"epoch": 0, "versions": [1, 2], "done": done, "twice": []}
    with pytest.raises(CheckpointError, match=r"range \[.*\) overlaps another or is not within"):
        Ledger(100).load_state_dict({"samples": 100, "whole": [], "parts": [page]})


def test_a_lease_and_its_commit_cost_next_to_nothing() -> None:
    """Both are part of every step; each takes a microsecond on an idle machine."""
    times = []
    for _ in range(20):
        ledger = Ledger(32 * 1000)
        start = time.thread_time()
        consume(ledger, 0, 32)
        times.append(time.thread_time() - start)
    assert min(times) / 1000 < 40e-6
