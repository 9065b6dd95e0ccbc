"""An order has every row once, and any part of it can be computed alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from echelon.core.errors import DataError
from echelon.data.feistel import BLOCK, Feistel
from echelon.data.order import SORTED, Order

ODD_SIZES = (SORTED - 1, SORTED, SORTED + 1, 4099, 8192, 10_007, 65_536, 65_537, 99_991, 2**17 - 1)
HUGE = 10**10


def test_every_row_comes_once_for_all_small_sizes() -> None:
    for n in range(1, 2001):
        assert np.array_equal(np.sort(Order(n, 3, n).rows(0, n)), np.arange(n)), n


@pytest.mark.parametrize("n", ODD_SIZES)
def test_every_row_comes_once_for_primes_powers_and_neighbours(n: int) -> None:
    assert np.array_equal(np.sort(Order(7, 0, n).rows(0, n)), np.arange(n))


def test_the_network_is_one_to_one_for_all_small_sizes() -> None:
    """`Order` sorts small sizes instead, but the network must be correct for them too."""
    for n in range(1, 2001):
        values = np.arange(n, dtype=np.uint64)
        Feistel(n, n).permute(values)
        assert np.array_equal(np.sort(values), np.arange(n)), n


@pytest.mark.parametrize("n", [100, SORTED, SORTED + 1, 3 * BLOCK + 5])
def test_a_part_is_the_same_as_in_the_whole(n: int) -> None:
    order = Order(1, 2, n)
    whole = order.rows(0, n)
    for start, stop in [(0, 0), (0, 1), (n // 3, n // 2), (n - 1, n), (n, n), (1, n - 1)]:
        assert np.array_equal(order.rows(start, stop), whole[start:stop])
    positions = np.array([n - 1, 0, n // 2, 0])
    assert np.array_equal(order.at(positions), whole[positions])


def test_who_changes_the_rows_does_not_change_the_order() -> None:
    order = Order(0, 0, 10)
    before = order.rows(0, 10)
    order.rows(0, 10)[:] = 0
    assert np.array_equal(order.rows(0, 10), before)


def test_orders_stay_what_they_were() -> None:
    """A resumed run must find the order it began with: these values may never change."""
    assert Order(0, 0, 10).rows(0, 10).tolist() == [0, 6, 4, 3, 2, 5, 7, 9, 1, 8]
    assert Order(42, 3, 60_000).rows(0, 5).tolist() == [18826, 16055, 36655, 54397, 124]
    assert Order(42, 3, HUGE).rows(HUGE - 5, HUGE).tolist() == [
        5840716763,
        885881218,
        5825617777,
        9304669611,
        8180832682,
    ]


def test_ten_billion_rows_take_no_memory() -> None:
    tracemalloc.start()
    order = Order(0, 0, HUGE)
    for start in range(0, HUGE, HUGE // 10):
        order.rows(start, start + 100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize("n", [HUGE, HUGE + 19, 2**40, 2**62])
def test_rows_of_a_huge_order_are_distinct_and_within_it(n: int) -> None:
    order = Order(9, 1, n)
    starts = np.sort(np.random.default_rng(0).integers(0, n - 50_000, 10))
    assert np.diff(starts).min() > 50_000
    rows = np.sort(order.at((starts[:, None] + np.arange(50_000)).ravel()))
    assert rows[0] >= 0
    assert rows[-1] < n
    assert np.diff(rows).min() > 0


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_that_cannot_be_are_refused(n: int) -> None:
    with pytest.raises(DataError, match=f"^{n} samples cannot be put in order"):
        Order(0, 0, n)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (5, 4)])
def test_positions_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=r"are not within \[0, 10\)"):
        Order(0, 0, 10).rows(start, stop)
