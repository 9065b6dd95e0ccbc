"""How long a sum over processes of one host takes: through shared memory, gloo, and the limit.

Gradients already lie where they live: in the slots of a gradient sum, or in the tensor given to
gloo. After a call every member can read the whole result. Ours also divides by the weight and
checks that all is finite, which gloo does not. The limit is a memcpy of as many bytes in every
member at the same time. The three take turns within a round; a figure is the median of rounds, a
round of small sums is many calls. The last line is one JSON object: speed-up over gloo.

    python benchmarks/reduction.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.comm import Collective, Group, Place

KB, MB = 1024, 1024 * 1024
SIZES = {"4KB": 4 * KB, "1MB": MB, "25MB": 25 * MB, "100MB": 100 * MB}
_DEADLINE = 120.0


def main() -> None:
    chosen = arguments()
    if chosen.index is not None:
        sit_in(chosen.index, chosen.members, chosen.port, chosen.listener, chosen.sizes)
        return
    ratios: dict[str, float] = {}
    for members in (2, 4):
        found = measure(members, SIZES)
        ratios |= {f"{members}x{size}": ratio for size, ratio in found.items()}
    print(json.dumps(ratios))


def measure(members: int, sizes: dict[str, int]) -> dict[str, float]:
    """Speed-up over gloo for every size; prints the milliseconds."""
    figures = run(members, list(sizes.values()))
    print(f"{members} members       ours ms    gloo ms  memcpy ms    × gloo  × memcpy")
    ratios = {}
    for name, (ours, gloo, copy) in zip(sizes, figures, strict=True):
        ratios[name] = round(gloo / ours, 2)
        line = f"{name:>12} {ours:12.4f} {gloo:10.4f} {copy:10.4f}"
        print(f"{line} {ratios[name]:9.1f} {copy / ours:9.2f}", flush=True)
    return ratios


def run(members: int, sizes: list[int]) -> list[list[float]]:
    """Milliseconds per size: ours, gloo, memcpy; from processes with one thread each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = [sys.executable, __file__, "--members", str(members)]
        here += ["--port", str(listener.getsockname()[1]), "--sizes", *map(str, sizes)]
        first = ["--listener", str(listener.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*here, "--index", str(index), *(first if index == 0 else [])],
                pass_fds=[listener.fileno()] if index == 0 else [],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for index in range(members)
        ]
    try:
        outputs = [process.communicate(timeout=10 * _DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    figures: list[list[float]] = json.loads(outputs[0])
    return figures


def sit_in(index: int, members: int, port: int, listener: int | None, sizes: list[int]) -> None:
    """One member's part; the first one prints the figures."""
    torch.set_num_threads(1)
    group = Group(Place(index, members, port=port, listener=listener, deadline=_DEADLINE))
    collective = group.collective()
    group.mesh({"all": members})
    figures = [compare(collective, size) for size in sizes]
    group.close()
    if index == 0:
        print(json.dumps(figures))


def compare(collective: Collective, size: int) -> list[float]:
    """Median milliseconds of ours, gloo and memcpy, slowest member."""
    values = torch.zeros(size // 4)
    sums = collective.gradients([values])
    other = torch.empty_like(values).zero_()

    def ours() -> None:
        sums.begin([1.0])
        sums.put_all(sums.slots)
        sums.finish()

    def gloo() -> None:
        dist.all_reduce(values)

    def copy() -> None:
        other.copy_(values)

    calls = 40 if size <= 64 * KB else 1
    rounds = 9 if size >= 64 * MB else 31
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 2):
        for side, call in enumerate((ours, gloo, copy)):
            refill(sums.slots[0], values)
            collective.barrier()
            took = timed(call, calls)
            if number >= 2:
                times[side].append(took)
    check(collective, sums.results[0], values)
    return [max(gathered(collective, statistics.median(found))) for found in times]


def refill(slot: torch.Tensor, values: torch.Tensor) -> None:
    """As after a backward pass: the member's own gradients are written anew."""
    slot.fill_(1.0)
    values.fill_(1.0)


def timed(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1000


def check(collective: Collective, mean: torch.Tensor, values: torch.Tensor) -> None:
    collective.barrier()
    values.fill_(1.0)
    dist.all_reduce(values)
    assert torch.equal(mean * collective.count, values), "the two sums differ"


def gathered(collective: Collective, value: float) -> list[float]:
    row = [0.0] * collective.count
    row[collective.index] = value
    return collective.sum(row)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--members", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
