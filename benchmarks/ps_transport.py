"""How fast gradients come to a parameter server and weights back, next to limits and to others.

100 MB of float32 between two processes of one thread each: the gradients there, the update with
torch's fused kernel, the weights back. Every side has its server and its caller running all the
time, and the callers take turns: a round is a few exchanges of each side. Ratios are those of the
medians. Limits are measured in the same rounds: the bare fused step and a memcpy in one process,
and 100 MB one way over TCP with nothing else. The last line is one JSON object; null stands for a
peer that is not installed, or for encryption on a host that has no address but loopback.

    make bench-peers
    .venv-bench/bin/python benchmarks/ps_transport.py
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable

from peers.wire_crew import Side, WireFailed, sides
from peers.wire_sides import SIDES, can_play

OPTIMIZERS = ("sgd", "adam")
PEERS = {
    "zmq": ["zmq"],
    "grpc": ["grpc"],
    "torch_rpc": ["torch_rpc", "torch_rpc cma", "torch_rpc tcp"],
}
"""A peer with several settings is as fast as the fastest of them, be it not over TCP."""
ASKED = ("plain", "sealed", "raw tcp", "zmq", "grpc", "torch_rpc")
"""Those whose small requests are timed."""

Figures = dict[str, float]
"""Milliseconds per side."""


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    names = [name for name in SIDES if can_play(name) and name in (chosen.only or SIDES)]
    try:
        with sides(names) as found:
            exchanges, cpu = measure(found, chosen.rounds, "exchange", chosen.exchanges)
            asked = {name: side for name, side in found.items() if name in ASKED}
            requests, _ = measure(asked, chosen.rounds, "ask", chosen.requests)
    except WireFailed as error:
        raise SystemExit(str(error)) from None
    table(exchanges, cpu, requests)
    if chosen.only:
        return
    print(json.dumps(summary(exchanges, requests)))


def measure(found: dict[str, Side], rounds: int, word: str, count: int) -> tuple[Figures, Figures]:
    """All rounds of all sides, in turn; the first one only warms up.

    Returns the median time of one, and the time on a core of all its processes together.
    """
    times: dict[str, list[float]] = {name: [] for name in found}
    cpu = dict.fromkeys(found, 0.0)
    for number in range(rounds + 1):
        for name in turned(list(found), number):
            side = found[name]
            before = side.cpu  # others' turns are not its own, and waiting costs something, too
            spent = side.do(word, count)
            if number:
                times[name] += spent
                cpu[name] += (side.cpu - before) / rounds / count
    return {name: statistics.median(spent) for name, spent in times.items()}, cpu


def turned(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


def summary(exchanges: Figures, requests: Figures) -> dict[str, float | None]:
    ours = exchanges["tcp sgd"]
    found: dict[str, float | None] = {
        "shm_over_step": worst(lambda o: exchanges[f"memory {o}"] / exchanges[f"step {o}"]),
        "tcp_over_raw": worst(
            lambda o: exchanges[f"tcp {o}"] / (2 * exchanges["raw tcp"] + exchanges[f"step {o}"])
        ),
    }
    for peer, settings in PEERS.items():
        times = [exchanges[name] for name in settings if name in exchanges]
        found[peer] = round(min(times) / ours, 2) if times else None
    for key, name in (("sparse_shm", "rows memory"), ("sparse_tcp", "rows tcp")):
        found[key] = round(exchanges["rows bare"] / exchanges[name], 3)
    found["p50_us"] = round(requests["plain"] * 1e3, 1)
    sealed = exchanges.get("tcp sgd, sealed")
    found["encrypted_of_plain"] = round(ours / sealed, 3) if sealed else None
    return found


def worst(ratio: Callable[[str], float]) -> float:
    return round(max(map(ratio, OPTIMIZERS)), 3)


def table(exchanges: Figures, cpu: Figures, requests: Figures) -> None:
    print(f"{'100 MB':>16} {'ms':>9} {'GB/s':>7} {'CPU ms':>9} {'4 KB µs':>9}")
    for name, spent in exchanges.items():
        small = f"{requests[name] * 1e3:9.1f}" if name in requests else ""
        print(f"{name:>16} {spent:9.2f} {moved(name) / spent / 1e6:7.2f} {cpu[name]:9.1f} {small}")


def moved(name: str) -> float:
    """Bytes that an exchange carries: there and back, but for the limits."""
    if name.startswith("rows"):
        return 2 * 10_000 * 64 * 4
    return 1e8 if name in ("copy", "raw tcp", "step sgd", "step adam") else 2e8


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--exchanges", type=int, default=3, help="of each side, per round")
    options.add_argument("--requests", type=int, default=500, help="of each side, per round")
    options.add_argument("--only", nargs="*", choices=SIDES, help="no ratios, then")
    return options.parse_args()


if __name__ == "__main__":
    main()
