"""How fast Echelon's all_reduce is next to DDP by hand and to other frameworks: 2 processes.

The same model, data, batch in all, optimizer and number of steps for every side, 2 processes of 1
thread each. Every round of every side starts processes of its own; rank 0 times its steps once it
is warm. Rounds of all sides take turns. Ratios are steps per second of Echelon ÷ those of the
peer: the median of the rounds' own ratios, so that what slows down a whole round cancels out.
Beside that, the sum of gradients alone next to gloo's. The last line is one JSON object; null
stands for a peer that is not installed.

    make bench-peers
    .venv-bench/bin/python benchmarks/collective.py
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import reduction
from loop import DATA, OURS, Rates, names, ratio, same_work, table
from peers import together
from peers.crew import SideFailed, play
from peers.work import CLAIMED, WORKS, Work

PEERS = ["ddp", "lightning", "accelerate", "fabric"]
SETTINGS = {"ddp": ["ddp", "ddp_view"]}
"""A peer with several settings is as fast as the fastest of them."""
BESIDE = {"cnn": ["ddp_last"]}
"""Shown in the table alone: with what Echelon does for convolutions done by hand."""
SUMS = "all_reduce"
PARTS = [*CLAIMED, SUMS]
STEPS = {"mlp": (180, 1800), "cnn": (6, 40), "gpt": (4, 30)}
"""To warm up, and timed."""

Ratios = dict[str, float | None]


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        print(json.dumps({part: measure(part, chosen) for part in chosen.only}))
    except SideFailed as error:
        raise SystemExit(str(error)) from None


def measure(part: str, chosen: argparse.Namespace) -> Ratios:
    return sums() if part == SUMS else compare(WORKS[part](chosen.data), chosen)


def compare(work: Work, chosen: argparse.Namespace) -> Ratios:
    """All rounds of one work; prints a table and returns the ratios."""
    warmup, steps = STEPS[work.name]
    steps = chosen.steps or steps
    print(
        f"\n{work.name} on {work.origin}, batch {work.batch_size} in all: {chosen.rounds} rounds "
        f"of {steps} steps, {together.MEMBERS} processes of 1 thread",
        flush=True,
    )
    task = [work.name, f"--data={chosen.data.resolve()}", f"--warmup={warmup}", f"--steps={steps}"]
    losses: dict[str, float] = {}
    rates: Rates = {side: [] for side in sides(work, chosen.peers)}
    for number in range(chosen.rounds):
        for side in turned(list(rates), number):
            rate, losses[side] = play(side, task, chosen.deadline)
            rates[side].append(rate)
    table(rates, losses)
    same_work(work, losses)
    return {peer: least(rates, peer) for peer in chosen.peers}


def sides(work: Work, peers: list[str]) -> list[str]:
    found = [side for peer in peers for side in SETTINGS.get(peer, [peer])]
    if "ddp" in peers:
        found += BESIDE.get(work.name, [])
    return [OURS, *filter(together.installed, found)]


def turned(sides: list[str], number: int) -> list[str]:
    """Another one begins in every round: none always has the same one before it."""
    at = number % len(sides)
    return sides[at:] + sides[:at]


def least(rates: Rates, peer: str) -> float | None:
    """Against the setting that suits the peer best."""
    found = [ratio(rates, side) for side in SETTINGS.get(peer, [peer])]
    return min((value for value in found if value is not None), default=None)


def sums() -> Ratios:
    """Gradients of several sizes added up in 2 and in 4 processes: speed-up over gloo."""
    print("\nsums of gradients", flush=True)
    return {
        f"{members}x{size}": value
        for members in (2, 4)
        for size, value in reduction.measure(members, reduction.SIZES).items()
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=names(PARTS), default=PARTS, metavar=",".join(PARTS))
    parser.add_argument("--peers", type=names(PEERS), default=PEERS, metavar=",".join(PEERS))
    parser.add_argument("--steps", type=int, help="timed steps per round")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds a round of a side may take"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
