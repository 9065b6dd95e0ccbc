"""How many steps per second a parameter server lets its trainers make, next to other ones.

One server and two asynchronous trainers, an mlp 784-2048-2048-10, batch 64 each, SGD: 23 MB of
gradients there and of weights back at every step, with little to compute for it.

    ceiling      the same two trainers without any synchronisation, each with a model of its own
    tensorflow   ParameterServerStrategy with its coordinator, one step or ten per call
    torch_rpc    torch.distributed.rpc, one call per step, as torch chooses and over CMA
    ray          a server actor and trainer actors
    echelon      `strategy=parameter_server`, staleness none, through shared memory: live weights
                 (what counts), or pinned ones, a copy per step; and over TCP

Every process has one thread, all processes of a side share `--cores` cores. Every round of every
side starts processes of its own; rounds of all sides take turns. Steps are counted in the trainers
(TensorFlow: by its coordinator) while all are warm and none has finished. Ratios are Echelon ÷
peer, the median of the rounds' own ratios; of a peer with several settings the fastest counts.

    make bench-peers
    .venv-bench/bin/python benchmarks/ps_training.py [--rounds N]

The last line is JSON: {"ceiling": …, "tensorflow": …, "torch_rpc": …, "ray": …, "tcp_tensorflow":
…}; null stands for a side that is not there. Goals: 0.85, 2.2, 1.4, 1.4; over TCP 1.6.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from statistics import median

from collective import turned
from loop import DATA, LEARNT, Rates, names
from peers.crew import SideFailed, play
from peers.ps_seat import SIDES, installed

OURS, TCP, CEILING = "echelon_live", "echelon_tcp", "ceiling"
SETTINGS = {
    "ceiling": [CEILING],
    "tensorflow": ["tensorflow", "tensorflow_10"],
    "torch_rpc": ["torch_rpc", "torch_rpc_cma"],
    "ray": ["ray"],
}
"""A peer with several settings is as fast as the fastest of them."""
WARMUP, STEPS = 20, 150
LEARNED = 1.0
"""A loss that all are below in the end: what has learnt nothing is at 2.3."""


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.cores])
    sides = [side for side in chosen.sides if installed(side)]
    print(f"{chosen.rounds} rounds of {chosen.steps} steps per trainer, {chosen.cores} cores")
    try:
        rates, losses = measure(sides, chosen)
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    table(rates, losses)
    same_work(losses)
    print(
        json.dumps({**{peer: against(rates, OURS, peer) for peer in SETTINGS}, **over_tcp(rates)})
    )


def measure(sides: list[str], chosen: argparse.Namespace) -> tuple[Rates, dict[str, float]]:
    task = [f"--data={chosen.data.resolve()}", f"--warmup={WARMUP}", f"--steps={chosen.steps}"]
    rates: Rates = {side: [] for side in sides}
    losses: dict[str, float] = {}
    for number in range(chosen.rounds):
        for side in turned(sides, number):
            rate, losses[side] = play(side, task, chosen.deadline, "peers.ps_seat")
            rates[side].append(rate)
        told = ", ".join(f"{side} {found[-1]:.1f}" for side, found in rates.items())
        print(f"round {number + 1}: {told}", flush=True)
    return rates, losses


def against(rates: Rates, ours: str, peer: str) -> float | None:
    """Against the setting that suits the peer best."""
    found = [ratio(rates, ours, side) for side in SETTINGS[peer]]
    return min((value for value in found if value is not None), default=None)


def over_tcp(rates: Rates) -> dict[str, float | None]:
    return {"tcp_tensorflow": against(rates, TCP, "tensorflow")}


def ratio(rates: Rates, ours: str, side: str) -> float | None:
    if ours not in rates or side not in rates:
        return None
    pairs = zip(rates[ours], rates[side], strict=True)
    return round(median(mine / theirs for mine, theirs in pairs), 3)


def table(rates: Rates, losses: dict[str, float]) -> None:
    print(f"{'':15}{'steps/s':>9}{'lowest':>9}{'highest':>9}{'÷ ceiling':>11}{'loss after':>12}")
    for side, found in rates.items():
        of_ceiling = ratio(rates, side, CEILING)
        print(
            f"{side:15}{median(found):>9.1f}{min(found):>9.1f}{max(found):>9.1f}"
            f"{'' if of_ceiling is None else format(of_ceiling, '.3f'):>11}{losses[side]:>12.4f}",
            flush=True,
        )


def same_work(losses: dict[str, float]) -> None:
    """Refuse to compare sides that did not learn, or not alike. The ceiling's models have each seen
    half the updates of a common one: they only have to have learnt."""
    common = [loss for side, loss in losses.items() if side != CEILING]
    alike = not common or max(common) <= LEARNT * min(common)
    if not (alike and max(losses.values()) < LEARNED):
        raise SystemExit(f"the sides did not do the same work: losses {losses}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=names(SIDES), default=list(SIDES), metavar=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=STEPS, help="timed, per trainer and round")
    parser.add_argument("--cores", type=int, default=2, help="for all processes of a side together")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds a round of a side may take"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
