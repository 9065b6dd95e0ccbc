"""How fast Echelon's loop is next to a hand-written one and to other frameworks.

The same model, data, batch size, optimizer, threads and number of steps for every side; rounds of
all sides take turns in one process. Ratios are steps per second of Echelon ÷ those of the peer:
the median of the rounds' own ratios, so that what slows down a whole round cancels out.
The last line is one JSON object; null stands for a peer that is not installed.

    make bench-peers
    .venv-bench/bin/python benchmarks/loop.py
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import peers
import torch
from peers.clock import Clock
from peers.screen import screen
from peers.work import CLAIMED, WORKS, Work

OURS = "echelon"
PEERS = [name for name in peers.NEEDS if name != OURS]
LEARNT = 1.5
"""The largest factor between two sides' final losses: what learns worse was given other work."""
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

Rates = dict[str, list[float]]


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    os.environ["TERM"] = "xterm-256color"
    warnings.simplefilter("ignore")
    works = (WORKS[name](chosen.data) for name in chosen.only)
    print(json.dumps({work.name: compare(work, chosen) for work in works}))


def compare(work: Work, chosen: argparse.Namespace) -> dict[str, float | None]:
    """All rounds of one work; prints a table and returns the ratios."""
    steps = chosen.steps or work.steps
    print(
        f"\n{work.name} on {work.origin}, batch {work.batch_size}: "
        f"{chosen.rounds} rounds of {steps} steps, {chosen.threads} threads",
        flush=True,
    )
    now = time.process_time if chosen.cpu_time else time.perf_counter
    losses: dict[str, float] = {}
    rates: Rates = {OURS: []} | {name: [] for name in chosen.peers if peers.installed(name)}
    for _ in range(chosen.rounds):
        for side in rates:
            clock = Clock(work.warmup, steps, now)
            losses[side] = play(side, work, clock)
            rates[side].append(clock.rate)
    table(rates, losses)
    same_work(work, losses)
    return {peer: ratio(rates, peer) for peer in chosen.peers}


def play(side: str, work: Work, clock: Clock) -> float:
    """One round of one side, in front of a terminal and without the rubbish of the last round."""
    gc.collect()
    with screen():
        return peers.load(side).train(work, clock)


def ratio(rates: Rates, peer: str) -> float | None:
    if peer not in rates:
        return None
    pairs = zip(rates[OURS], rates[peer], strict=True)
    return round(statistics.median(ours / theirs for ours, theirs in pairs), 3)


def table(rates: Rates, losses: dict[str, float]) -> None:
    print(f"{'':12}{'steps/s':>10}{'lowest':>10}{'highest':>10}{'Echelon ÷':>12}{'loss after':>12}")
    for side, found in rates.items():
        against = "" if side == OURS else f"{ratio(rates, side):.3f}"
        print(
            f"{side:12}{statistics.median(found):>10.1f}{min(found):>10.1f}{max(found):>10.1f}"
            f"{against:>12}{losses[side]:>12.4f}",
            flush=True,
        )


def same_work(work: Work, losses: dict[str, float]) -> None:
    """Refuse to compare sides that did not learn, or not alike."""
    best, worst = min(losses.values()), max(losses.values())
    if not worst <= min(best * LEARNT + 0.01, math.log(work.classes)):
        raise SystemExit(f"the sides did not do the same work: losses {losses}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=names(WORKS), default=CLAIMED, metavar=",".join(WORKS))
    parser.add_argument("--peers", type=names(PEERS), default=PEERS, metavar=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, help="timed steps per round")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time the process's CPU instead of the wall: for a busy machine, with --threads 1",
    )
    return parser.parse_args()


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
