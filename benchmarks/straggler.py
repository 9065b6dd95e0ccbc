"""How much of four members' speed is left when one of them is four times slower than the others.

Batches have the same size whoever takes part. Where they are divided equally, as by DDP, all wait
for the slowest; Echelon divides them by speed. Members' speeds are set: a sample takes a fixed
time, which is waited (see `peers/paced.py` for why, and what is real).

    own speeds   one process alone, in the same loop as DDP's, with a quarter of the batch
    ddp          4 processes, torchrun, DDP by hand
    echelon      `echelon train … strategy=all_reduce workers=4`

    python benchmarks/straggler.py [--rounds N]

The last line is JSON: {"echelon": …, "ddp": …}: samples per second as a fraction of the sum of the
members' own speeds, once all are warm; medians of the rounds. The table also has the fraction from
the first update on, in which Echelon finds out who is slow. Goal: at least 0.85; equal parts can
give no more than 4 · 0.25 / 3.25 = 0.31.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from peers import paced
from peers.crew import SideFailed
from peers.faults import running
from peers.stamps import Stamp
from peers.work import LR

if TYPE_CHECKING:
    from echelon import Task

MEMBERS = 4
BATCH = 208
WARM, STEPS = 30, 100
"""Updates until all are warm and batches divided, and in all."""
DEADLINE = 180.0


def task(folder: str) -> Task:
    """What Echelon trains."""
    from peers.stamps import StampedAdamW

    import echelon

    x, y = paced.data()
    return echelon.Task(
        model=lambda: paced.Device(paced.factor_here(Path(folder))),
        loss=echelon.cross_entropy,
        optimizer=lambda parameters: StampedAdamW(parameters, Path(folder, "stamps"), LR),
        train={"x": x, "y": y},
    )


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    found: dict[str, list[float]] = {"echelon": [], "ddp": []}
    try:
        speeds = own_speeds()
        for number in range(chosen.rounds):
            for side in list(found)[:: 1 if number % 2 == 0 else -1]:
                warm, whole = (rate / sum(speeds) for rate in played(side))
                print(f"round {number + 1}: {side} {warm:.3f}, from the first update {whole:.3f}")
                sys.stdout.flush()
                found[side].append(warm)
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    print(json.dumps({side: round(median(values), 3) for side, values in found.items()}))


def own_speeds() -> list[float]:
    """Samples per second of each member, were it alone."""
    part = BATCH // MEMBERS
    fast, slow = (measured(by_hand(1, part, factor), part)[0] for factor in (1, paced.SLOWER))
    print(f"own speeds: {fast:.0f} samples/s, the slow one {slow:.0f}", flush=True)
    return [fast] * (MEMBERS - 1) + [slow]


def played(side: str) -> tuple[float, float]:
    return measured(by_echelon() if side == "echelon" else by_hand(MEMBERS, BATCH, 0), BATCH)


def by_hand(count: int, batch: int, factor: int) -> list[str]:
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [*start, "-m", "peers.paced", "FOLDER", str(STEPS), str(batch), str(factor)]


def by_echelon() -> list[str]:
    settings = {
        "task": f"{Path(__file__).resolve()}:task",
        "args.folder": "FOLDER",
        "strategy": "all_reduce",
        "workers": MEMBERS,
        "batch_size": BATCH,
        "threads": 1,
        "epochs": "null",
        "steps": STEPS,
        "evaluate.every": "never",
        "checkpoint.every": "never",
    }
    return ["echelon", "train", *(f"{name}={value}" for name, value in settings.items())]


def measured(command: list[str], batch: int) -> tuple[float, float]:
    """Samples per second of a run: once it is warm, and from its first update on."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("FOLDER", folder) for word in command]
        with running(words, Path(folder), Path(folder, "stamps")) as run:
            run.wait_for(lambda seen: bool(seen) and seen[-1].step >= STEPS, DEADLINE)
            seen = run.stamps()
    return batch * rate(seen, WARM), batch * rate(seen, 1)


def rate(stamps: list[Stamp], first: int) -> float:
    """Updates per second from this one on."""
    began, ended = (min(s.moment for s in stamps if s.step == at) for at in (first, STEPS))
    return (STEPS - first) / (ended - began)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
