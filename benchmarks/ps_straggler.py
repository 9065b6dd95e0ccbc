"""What a trainer that is four times slower than three others costs them, and how long it takes to
learn all the same.

Where all wait for each other at every update, and batches are divided equally, four trainers are
as fast as the slowest allows: 4 · 0.25 / 3.25 = 0.31 of the sum of their speeds. A parameter server
need not let them wait. Trainers' speeds are set: a sample takes a fixed time, which is waited (see
`peers/ps_paced.py` for what is real).

    own speeds   one process alone, without any server
    async        `echelon train … strategy=parameter_server workers=4`, staleness none
    ssp          staleness 4
    sync         staleness 0: every update is made by all, in equal parts
    balanced     the same with parts that follow speed, which is Echelon's default; in the table

The second part is the time from the first training step to the evaluation that saw the target
accuracy on held-out Fashion-MNIST; everyone is evaluated after every 100 updates. The target is
what this network reaches after four epochs or so. A linear model has 0.84, which is seen within the
first one, a few evaluations earlier or later by chance: when that was is told, too. Every round
has another seed, and so another order of the samples.

    python benchmarks/ps_straggler.py [--rounds N]

The last line is JSON: {"async_of_sum": …, "ssp_of_sum": …, "time_gain": …}: samples per second as a
fraction of the sum of the trainers' own speeds, and by how much the slower of async and ssp is at
the target sooner than sync; medians of the rounds. Goals: 0.9, 0.9, 2.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from loop import DATA
from peers import ps_paced
from peers.crew import SideFailed, run
from peers.paced import SLOWER
from peers.ps_job import rate, read_ticks

if TYPE_CHECKING:
    from echelon import Task

TRAINERS = 4
MODES: dict[str, dict[str, Any]] = {
    "async": {"parameter_server.staleness": "none"},
    "ssp": {"parameter_server.staleness": 4},
    "sync": {"parameter_server.staleness": 0, "elastic.balance": False},
    "balanced": {"parameter_server.staleness": 0},
}
WARM, STEPS = 10, 800
"""Steps of every trainer until all are warm, and updates in all."""
ALONE = 40
EASY, TARGET, LOOK = 0.84, 0.87, 100
"""Accuracies: one that is told on the way, the one to reach; the updates between evaluations."""
DEADLINE = 600.0


Times = dict[str, list[float]]
"""Per mode, a figure of each round."""


def task(data: str, folder: str) -> Task:
    """What Echelon trains."""
    import echelon

    train, valid = ps_paced.data(Path(data))
    return echelon.Task(
        model=ps_paced.model,
        loss=echelon.cross_entropy,
        metrics={"accuracy": ps_paced.correct},
        train=train,
        valid=valid,
        forward=ps_paced.paced(Path(folder)),
    )


def main() -> None:
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    fractions: Times = {"async": [], "ssp": []}
    seconds: Times = {mode: [] for mode in MODES}
    easy: Times = {mode: [] for mode in MODES}
    try:
        for number in range(chosen.rounds):
            whole = sum(own_speeds(chosen.data))
            for mode in turned(fractions, number):
                fractions[mode].append(speed(mode, chosen.data) / whole)
            for mode in turned(seconds, number):
                first, last = times_to(mode, chosen.data, seed=number)
                easy[mode].append(first)
                seconds[mode].append(last)
            told(number, whole, fractions, {EASY: easy, TARGET: seconds})
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    of_sum = {f"{mode}_of_sum": round(median(found), 3) for mode, found in fractions.items()}
    print(f"accuracy {EASY}: sooner than sync by {median(gains(easy)):.3f}")
    print(json.dumps({**of_sum, "time_gain": round(median(gains(seconds)), 3)}))


def turned(modes: Sequence[str] | dict[str, Any], number: int) -> list[str]:
    return list(modes)[:: 1 if number % 2 == 0 else -1]


def own_speeds(data: Path) -> list[float]:
    """Samples per second of each trainer, were it alone."""
    fast, slow = (alone(data, factor) for factor in (1, SLOWER))
    return [fast] * (TRAINERS - 1) + [slow]


def alone(data: Path, factor: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [str(data), folder, str(factor), str(ALONE)]
        run("one trainer alone", ["peers.ps_paced", *words], Path(folder), DEADLINE)
        return rate(Path(folder, "ticks"), WARM, trainers=1)


def speed(mode: str, data: Path) -> float:
    """Samples per second of all trainers, once they are warm."""
    settings = {"steps": STEPS, "evaluate.every": "never"}
    with tempfile.TemporaryDirectory() as folder:
        train(mode, data, Path(folder), settings)
        return rate(Path(folder, "ticks"), WARM, TRAINERS)


def times_to(mode: str, data: Path, seed: int) -> tuple[float, float]:
    """Seconds until the easy accuracy was seen, and the target."""
    settings = {
        "seed": seed,
        "epochs": 100,
        "evaluate.every": LOOK,
        "stop.metric": "accuracy",
        "stop.target": TARGET,
    }
    with tempfile.TemporaryDirectory() as folder:
        train(mode, data, Path(folder), settings)
        ticks = read_ticks(Path(folder, "ticks")).values()
        seen = accuracies(Path(folder, "runs"))
    began = min(tick.moment for mine in ticks for tick in mine) + time.time() - time.monotonic()
    easy, target = (min(at for at, value in seen if value >= wanted) for wanted in (EASY, TARGET))
    return easy - began, target - began


def accuracies(store: Path) -> list[tuple[float, float]]:
    """When each was seen, and what it was."""
    from echelon.track import Store

    runs = Store(store)
    series = runs.series(runs.run("last").id, "valid/accuracy")
    return list(zip(series.times, series.values, strict=True))


def train(mode: str, data: Path, folder: Path, settings: dict[str, Any]) -> None:
    whole = {
        "task": f"{Path(__file__).resolve()}:task",
        "args.data": data.resolve(),
        "args.folder": folder,
        "strategy": "parameter_server",
        "workers": TRAINERS,
        "batch_size": ps_paced.BATCH,
        "optimizer.name": "sgd",
        "optimizer.lr": ps_paced.LR,
        "threads": 1,
        "checkpoint.every": "never",
        "track.folder": folder / "runs",
        **MODES[mode],
        **settings,
    }
    words = [f"{name}={value}" for name, value in whole.items()]
    run(mode, ["echelon", "train", *words], folder, DEADLINE)


def gains(seconds: Times) -> list[float]:
    """Of the slower of the two, against sync, round by round."""
    rows = zip(seconds["sync"], seconds["async"], seconds["ssp"], strict=True)
    return [sync / max(free, bounded) for sync, free, bounded in rows]


def told(number: int, whole: float, fractions: Times, reached: dict[float, Times]) -> None:
    parts = ", ".join(f"{mode} {found[-1]:.3f}" for mode, found in fractions.items())
    print(f"round {number + 1}: sum of speeds {whole:.0f} samples/s, of it {parts}")
    for accuracy, seconds in reached.items():
        times = ", ".join(f"{mode} {found[-1]:.1f} s" for mode, found in seconds.items())
        print(f"         accuracy {accuracy} after: {times}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    return parser.parse_args()


if __name__ == "__main__":
    main()
