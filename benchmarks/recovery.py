"""What it costs to lose one of three workers, next to torchrun, and how long it takes to join.

Both sides train the same small cnn in 3 processes of 1 thread, and write a checkpoint every 25
steps. Once they are warm one process is killed (SIGKILL), another one in every round. The
optimizer, the same on both sides, writes down every update that any process applies: moment, pid,
step.

    echelon    `echelon train … strategy=all_reduce workers=3`; the survivors go on
    torchrun   DDP, `torchrun --max-restarts`: all are started again, from the last checkpoint
    join       `echelon join` of that run, from starting the command to the first update that
               this process applied

Counted is the time from the kill to the first update that is beyond anything the killed process
can have had a part in: with v its last, the first ≥ v + 2 that another process applied.

    python benchmarks/recovery.py [--rounds N]

The last line is JSON: {"echelon_s": …, "torchrun_s": …, "ratio": torchrun ÷ echelon, "join_s": …},
medians of the rounds. Goals: at most 1 s, at least 8 times quicker, join at most 5 s.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from peers import fault_work
from peers.crew import SideFailed
from peers.faults import Run, pids, recovery, running

if TYPE_CHECKING:
    from echelon import Task

WARM = 60
"""Steps before anything happens."""
DEADLINE = 120.0


def task(stamps: str) -> Task:
    """What Echelon trains; its members and whoever joins read this file."""
    import echelon

    x, y = fault_work.data()
    return echelon.Task(
        model=fault_work.model,
        loss=echelon.cross_entropy,
        optimizer=lambda parameters: fault_work.optimizer(parameters, Path(stamps)),
        train={"x": x, "y": y},
    )


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    found: dict[str, list[float]] = {"echelon": [], "join": [], "torchrun": []}
    try:
        for number in range(chosen.rounds):
            for side in (echelon, torchrun)[:: 1 if number % 2 == 0 else -1]:
                for name, seconds in played(side, number).items():
                    found[name].append(seconds)
            print(f"round {number + 1}: " + told(found, lambda values: values[-1]), flush=True)
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    print(f"median:  {told(found, median)}")
    middle = {f"{name}_s": round(median(values), 3) for name, values in found.items()}
    ratio = round(median(found["torchrun"]) / median(found["echelon"]), 2)
    order = ("echelon_s", "torchrun_s", "ratio", "join_s")
    print(json.dumps({name: (middle | {"ratio": ratio})[name] for name in order}))


def played(side: Callable[[Path, int], dict[str, float]], number: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return side(Path(folder), number % fault_work.MEMBERS)


def echelon(folder: Path, victim: int) -> dict[str, float]:
    stamps = folder / "stamps"
    settings = {
        "task": f"{Path(__file__).resolve()}:task",
        "args.stamps": stamps,
        "strategy": "all_reduce",
        "workers": fault_work.MEMBERS,
        "batch_size": fault_work.BATCH,
        "threads": 1,
        "epochs": 1_000_000,
        "evaluate.every": "never",
        "checkpoint.every": fault_work.SAVE_EVERY,
        "name": "recovery",
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    with running(["echelon", "train", *words], folder, stamps) as run:
        found = {"echelon": killed(run, victim)}
        began = time.monotonic()
        before = pids(run.stamps())
        with running(["echelon", "join", "runs/recovery-0001"], folder, stamps) as newcomer:
            newcomer.wait_for(lambda seen: pids(seen) != before, DEADLINE)
            first = next(stamp for stamp in newcomer.stamps() if stamp.pid not in before)
            return found | {"join": first.moment - began}


def torchrun(folder: Path, victim: int) -> dict[str, float]:
    stamps, checkpoint = folder / "stamps", folder / "checkpoint"
    command = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={fault_work.MEMBERS}",
        "--max-restarts=3",
        *("-m", "peers.restarting", str(stamps), str(checkpoint)),
    ]
    # As it comes, torchrun lets workers meet in its own store, where gloo finds the addresses of
    # before the restart: most restarts then hang for half a minute, or fail for good.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with running(command, folder, stamps, **fresh) as run:
        return {"torchrun": killed(run, victim)}


def killed(run: Run, victim: int) -> float:
    """Once all are warm."""
    run.wait_for(lambda seen: bool(seen) and seen[-1].step >= WARM, DEADLINE)
    return recovery(run, pids(run.stamps())[victim], DEADLINE)


def told(found: dict[str, list[float]], pick: Callable[[list[float]], float]) -> str:
    return ", ".join(f"{name} {pick(values):.2f} s" for name, values in found.items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
