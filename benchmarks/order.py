"""How fast an order of ten billion rows is computed, and what it takes up.

One thread on one core. Memory is the peak of the process over what it had after its imports.
The last line is one JSON object.

    python benchmarks/order.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from echelon.data.order import Order

STATUS = Path("/proc/self/status")


def main() -> None:
    chosen = arguments()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = kilobytes("VmRSS")
    forget_peak()
    order = Order(chosen.seed, 0, chosen.n)
    rates = [
        rate(order, number, chosen.rounds, chosen.positions) for number in range(chosen.rounds)
    ]
    extra = (kilobytes("VmHWM") - before) / 1024
    print(f"{chosen.n:,} rows, {chosen.rounds} × {chosen.positions:,} positions at a time")
    print(f"positions/s  {min(rates):,.0f} to {max(rates):,.0f}")
    print(f"memory       {extra:.1f} MB over the imports")
    check(order, chosen.positions)
    result = {"positions_per_s": round(statistics.median(rates)), "extra_mb": round(extra, 1)}
    print(json.dumps(result))


def rate(order: Order, number: int, rounds: int, positions: int) -> float:
    """Positions per second, somewhere else in the order each time."""
    start = (order.n - positions) * number // max(1, rounds - 1)
    began = time.perf_counter()
    order.rows(start, start + positions)
    return positions / (time.perf_counter() - began)


def check(order: Order, positions: int) -> None:
    """No row twice among the first and last positions, and all within."""
    first, last = order.rows(0, positions), order.rows(order.n - positions, order.n)
    rows = np.sort(np.concatenate([first, last]))
    assert rows[0] >= 0
    assert rows[-1] < order.n
    assert (np.diff(rows) > 0).all(), "a row stands at two positions"
    print(f"distinct     {len(rows):,} of {len(rows):,} rows from both ends")


def kilobytes(name: str) -> int:
    """A figure of this process as Linux counts it."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Begin VmHWM anew: importing takes more for a moment than it keeps."""
    Path("/proc/self/clear_refs").write_text("5")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=10**10, help="rows in the order")
    parser.add_argument("--positions", type=int, default=1 << 20, help="asked for at a time")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not 1 <= chosen.positions <= chosen.n // 2 or chosen.rounds < 1:
        parser.error("--positions must be 1 to n / 2, and --rounds at least 1")
    return chosen


if __name__ == "__main__":
    main()
