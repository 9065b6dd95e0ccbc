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
accuracy on held-out Fashion-MNIST; everyone is evaluated after every 100 updates. Every round has
another seed: one order of the samples may see the target early by chance.

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
TARGET, LOOK = 0.84, 100
"""The accuracy to reach, and the updates between two evaluations."""
DEADLINE = 300.0


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
    fractions: dict[str, list[float]] = {"async": [], "ssp": []}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        for number in range(chosen.rounds):
            whole = sum(own_speeds(chosen.data))
            for mode in turned(fractions, number):
                fractions[mode].append(speed(mode, chosen.data) / whole)
            for mode in turned(seconds, number):
                seconds[mode].append(time_to_target(mode, chosen.data, seed=number))
            told(number, whole, fractions, seconds)
    except SideFailed as error:
        raise SystemExit(str(error)) from None
    of_sum = {f"{mode}_of_sum": round(median(found), 3) for mode, found in fractions.items()}
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


def time_to_target(mode: str, data: Path, seed: int) -> float:
    settings = {
        "seed": seed,
        "epochs": 100,
        "evaluate.every": LOOK,
        "stop.metric": "accuracy",
        "stop.target": TARGET,
    }
    with tempfile.TemporaryDirectory() as folder:
        train(mode, data, Path(folder), settings)
        moments = [t.moment for mine in read_ticks(Path(folder, "ticks")).values() for t in mine]
    return max(moments) - min(moments)


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


def gains(seconds: dict[str, list[float]]) -> list[float]:
    """Of the slower of the two, against sync, round by round."""
    rows = zip(seconds["sync"], seconds["async"], seconds["ssp"], strict=True)
    return [sync / max(free, bounded) for sync, free, bounded in rows]


def told(
    number: int,
    whole: float,
    fractions: dict[str, list[float]],
    seconds: dict[str, list[float]],
) -> None:
    parts = ", ".join(f"{mode} {found[-1]:.3f}" for mode, found in fractions.items())
    times = ", ".join(f"{mode} {found[-1]:.1f} s" for mode, found in seconds.items())
    print(f"round {number + 1}: sum of speeds {whole:.0f} samples/s, of it {parts}")
    print(f"         accuracy {TARGET} after: {times}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    return parser.parse_args()


if __name__ == "__main__":
    main()
