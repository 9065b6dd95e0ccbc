"""Whether updates are ever staler than a run allows, while trainers stall, die and join at random.

`echelon train … strategy=parameter_server` with four trainers and two servers, for several bounds
in turn. Each trainer pauses at random, mostly shortly, now and then for dozens of the others'
steps. Every few seconds one is killed (SIGKILL), or one more joins. How stale each update was is
not asked of the servers: it is read off the weights that trainers hold (see `peers/ps_witness.py`).

    python benchmarks/ps_staleness.py [--minutes 10] [--bounds 1,2,4,8,none]

The bound `none` is the control: there the same pauses must lead to more than the largest bound, or
this test would prove nothing. Each run must end well, and with every sample on record exactly once.

The last line is JSON: {"worst": {"1": …, …}, "updates": …, "exact": …, "kills": …, "joins": …}. An
update that was too stale, or weights of two versions at once, end this with an error. `exact` is
the part of updates whose staleness is known for certain; where no trainer held the weights in
between two updates, only the least that it can have been is known.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peers import ps_witness
from peers.crew import SideFailed, end, environment, run, tail
from peers.ps_witness import Verdict

if TYPE_CHECKING:
    from echelon import Task

TRAINERS, FEWEST, MOST = 4, 2, 6
SERVERS = 2
PLANES = ("memory", "tcp")
FREE = "none"
NAME = "staleness"
CALM = 5.0
"""Seconds in which nothing happens: at the beginning, and after it."""
GRACE = 60.0


def task(folder: str) -> Task:
    """What Echelon trains; trainers that join read this file, too."""
    import echelon

    return echelon.Task(
        model=ps_witness.Counting,
        loss=ps_witness.loss,
        train=ps_witness.data(),
        forward=ps_witness.watched(Path(folder)),
    )


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    draw = random.Random(chosen.seed)
    found: dict[str, Verdict] = {}
    faults = {"kills": 0, "joins": 0}
    seconds = 60 * chosen.minutes / len(chosen.bounds)
    try:
        for number, bound in enumerate(chosen.bounds):
            plane = PLANES[number % len(PLANES)]
            with tempfile.TemporaryDirectory() as folder:
                found[bound] = disturbed(Path(folder), bound, plane, seconds, draw, faults)
            check(bound, found[bound])
            print(f"staleness {bound}, {plane}: {told(found[bound])}", flush=True)
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    control(found)
    updates = sum(verdict.updates for verdict in found.values())
    exact = sum(verdict.exact for verdict in found.values()) / updates
    worst = {bound: verdict.worst for bound, verdict in found.items()}
    print(json.dumps({"worst": worst, "updates": updates, "exact": round(exact, 3), **faults}))


def disturbed(
    folder: Path,
    bound: str,
    plane: str,
    seconds: float,
    draw: random.Random,
    faults: dict[str, int],
) -> Verdict:
    """One run, and what its trainers have seen."""
    with ExitStack() as stack:
        training = stack.enter_context(started(train(folder, bound, plane, seconds), folder))
        until = time.monotonic() + seconds + GRACE
        while training.poll() is None:
            pause(training, draw.uniform(CALM, 2 * CALM))
            if time.monotonic() > until:
                raise SideFailed(f"did not end; it printed:\n{tail(folder / 'printed')}")
            alive = trainers(folder)
            if training.poll() is not None or len(alive) < FEWEST:
                continue
            if len(alive) < MOST and (len(alive) == FEWEST or draw.random() < 0.5):
                words = ["echelon", "join", str(folder / "runs" / f"{NAME}-0001")]
                stack.enter_context(started(words, folder, "joined"))
                faults["joins"] += 1
            else:
                os.kill(draw.choice(alive), signal.SIGKILL)
                faults["kills"] += 1
        if training.returncode != 0:
            how = f"staleness {bound}, {plane}: ended with {training.returncode}"
            raise SideFailed(f"{how}; it printed:\n{tail(folder / 'printed')}")
    verify = ["echelon", "runs", "ledger", f"{NAME}-0001", "--folder", str(folder / "runs")]
    run("the ledger", [*verify, "--verify"], folder, GRACE)
    return ps_witness.judged(ps_witness.read_seen(folder.glob("seen-*")))


def train(folder: Path, bound: str, plane: str, seconds: float) -> list[str]:
    settings = {
        "task": f"{Path(__file__).resolve()}:task",
        "args.folder": folder,
        "name": NAME,
        "strategy": "parameter_server",
        "workers": TRAINERS,
        "parameter_server.servers": SERVERS,
        "parameter_server.staleness": bound,
        "parameter_server.quorum": 1,
        "parameter_server.plane": plane,
        # Else parts of a batch follow speed, and the learning rate with them: counters would not
        # count in ones.
        "elastic.balance": False,
        "batch_size": ps_witness.BATCH,
        "optimizer.name": "sgd",
        "optimizer.lr": 1.0,
        "threads": 1,
        "epochs": "null",
        "minutes": seconds / 60,
        "checkpoint.every": 500,
        "track.folder": folder / "runs",
    }
    return ["echelon", "train", *(f"{name}={value}" for name, value in settings.items())]


@contextmanager
def started(
    command: list[str], folder: Path, name: str = "printed"
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / name).open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def pause(training: subprocess.Popen[bytes], seconds: float) -> None:
    until = time.monotonic() + seconds
    while training.poll() is None and time.monotonic() < until:
        time.sleep(0.1)


def trainers(folder: Path) -> list[int]:
    """Those that have begun a step lately."""
    recent = time.time() - CALM
    return sorted(
        int(file.name.partition("-")[2])
        for file in folder.glob("seen-*")
        if file.stat().st_mtime > recent and Path("/proc", file.name.partition("-")[2]).exists()
    )


def check(bound: str, found: Verdict) -> None:
    if bound != FREE and found.worst > int(bound):
        raise SystemExit(f"an update was {found.worst} versions stale where {bound} are allowed")


def control(found: dict[str, Verdict]) -> None:
    bounds = [int(bound) for bound in found if bound != FREE]
    if FREE in found and bounds and found[FREE].worst <= max(bounds):
        raise SystemExit(f"without a bound staleness was at most {found[FREE].worst}, too")


def told(found: Verdict) -> str:
    return (
        f"{found.updates} updates, at most {found.worst} stale, {found.mean:.2f} on average, "
        f"{found.exact / found.updates:.0%} known exactly"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--bounds", type=lambda text: text.split(","), default="1,2,4,8,none")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed or joins when")
    return parser.parse_args()


if __name__ == "__main__":
    main()
