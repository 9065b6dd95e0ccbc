"""An order passes statistical tests of a random shuffle.

The seeds are fixed, so the results never change; the bounds are five standard deviations.
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from echelon.data.order import Order

Numbers = NDArray[np.int64]


def deviation(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    """Return how many standard deviations chi² is above its expected value."""
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def evenness(values: Numbers, low: int, n: int) -> float:
    """Return the deviation of values that should be uniform in [low, n)."""
    buckets = min(512, n // 4)
    share = np.bincount(np.arange(low, n) * buckets // n, minlength=buckets) / (n - low)
    counts = np.bincount(values.ravel() * buckets // n, minlength=buckets)
    return deviation(counts, share * values.size)


def orders(n: int, count: int, epoch: int = 0) -> Numbers:
    return np.stack([Order(seed, epoch, n).rows(0, n) for seed in range(count)])


def test_all_orders_of_four_rows_are_as_frequent() -> None:
    seen = [tuple(order) for order in orders(4, 12_000).tolist()]
    counts = np.array([seen.count(order) for order in permutations(range(4))])
    assert abs(deviation(counts, 500)) < 5


@pytest.mark.parametrize("n", [2, 5, 9, 16, 31, 50])
def test_each_row_is_as_frequent_at_each_position(n: int) -> None:
    drawn = orders(n, 3000)
    counts = np.stack([np.bincount(drawn[:, position], minlength=n) for position in range(n)])
    # Rows and columns of the table add up to a fixed number, so it is less free than its size.
    chi2 = float(((counts - 3000 / n) ** 2 / (3000 / n)).sum())
    freedom = (n - 1) ** 2
    assert abs(chi2 - freedom) / math.sqrt(2 * freedom) < 5


@pytest.mark.parametrize("n", [4097, 5000, 9973])
def test_each_position_holds_any_row_over_many_seeds(n: int) -> None:
    for position in (0, 1, n // 2, n - 1):
        rows = np.array([Order(seed, 0, n).rows(position, position + 1)[0] for seed in range(2000)])
        assert abs(evenness(rows, 0, n)) < 5, position


@pytest.mark.parametrize("n", [200, 4097, 60_000])
@pytest.mark.parametrize("lag", [1, 2, 64, "row"])
def test_neighbours_are_unrelated(n: int, lag: int | str) -> None:
    """Including rows √n apart, where a half of the network's input repeats."""
    distance = lag if isinstance(lag, int) else -(-n // (math.isqrt(n - 1) + 1))
    drawn = orders(n, 400_000 // n)
    steps = (drawn[:, distance:] - drawn[:, :-distance]) % n
    assert abs(evenness(steps, 1, n)) < 5


@pytest.mark.parametrize("n", [1000, 60_000, 10**10])
def test_there_is_no_serial_correlation(n: int) -> None:
    rows = Order(3, 0, n).rows(0, min(n, 200_000)) / n
    correlation = float(np.corrcoef(rows[1:], rows[:-1])[0, 1])
    assert abs(correlation) < 5 / math.sqrt(len(rows))


@pytest.mark.parametrize("n", [500, 60_000])
def test_seeds_and_epochs_give_unrelated_orders(n: int) -> None:
    one = orders(n, 400_000 // n)
    for other in (np.roll(one, 1, axis=0), orders(n, 400_000 // n, epoch=1)):
        assert abs(evenness((one - other) % n, 0, n)) < 5
        same = int((one == other).sum())  # one in each order, on average
        assert abs(same - len(one)) < 5 * math.sqrt(len(one))


def test_a_window_meets_the_rows_as_evenly_as_chance() -> None:
    """With too few rounds, windows of the order would cover the halves too evenly."""
    n, side = 10_000, 100
    spread = []
    for seed in range(60):
        left = (Order(seed, 0, n).rows(0, n) // side).reshape(50, 200)
        counts = [np.bincount(window, minlength=side) for window in left]
        spread.append(np.var(counts))
    expected = 200 * (side / n) * (1 - side / n) * (n - 200) / (n - 1)
    error = np.std(spread) / math.sqrt(len(spread))
    assert abs(np.mean(spread) - expected) < 5 * error
