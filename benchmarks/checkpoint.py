"""Claim: a checkpoint stops training for little longer than it takes to copy its state in memory.

A gpt of about 100 million parameters is trained with adam: weights and two moments of each, 1.2 GB
in 690 tensors. Measured in turns, each after an update and with the disk at rest:

    pause    how long `Run.save` keeps the loop waiting, whatever goes to disk later
    memcpy   the C library's memcpy of each of these tensors into memory that was touched before
    flat     memcpy of as many bytes that lie in one piece, which no state does: for pieces beyond
             100 MB the C library writes past the caches, and saves a third of the traffic

memcpy runs in one thread, the pause in as many as training has. Then steps are timed while nothing
is being written, and while a checkpoint is.

    python benchmarks/checkpoint.py [--rounds N] [--folder DIR] [--threads N]

The last line is JSON: {"pause_over_memcpy": …, "pause_over_flat": …, "pause_ms": …,
"step_while_writing": duration of a step while a checkpoint is written ÷ otherwise}.
Goal: at most 1.5.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from echelon import cross_entropy
from echelon.checkpoint.state import flatten
from echelon.comm import Alone
from echelon.core.config import job_from
from echelon.core.interfaces import Task
from echelon.loop.build import assemble
from echelon.loop.run import Run
from echelon.models.gpt import GPT, GPTOptions
from echelon.task import prepare
from echelon.track import Observers

VOCABULARY, CONTEXT, TEXTS = 2048, 16, 4096
LARGE = GPTOptions(layers=14, heads=12, width=768)
WARM, STEPS = 2, 12


def built() -> Run:
    """A run of one process that only has to be told when to save."""
    tokens = torch.randint(VOCABULARY, (TEXTS, CONTEXT + 1))
    task = Task(
        lambda: GPT(VOCABULARY, CONTEXT, LARGE),
        cross_entropy,
        train={"x": tokens[:, :-1], "y": tokens[:, 1:]},
    )
    job = job_from(
        {
            "epochs": 1,
            "batch_size": 1,
            "optimizer": {"name": "adam", "lr": 1e-4},
            "checkpoint": {"keep": 1},
        }
    )
    return assemble(job, prepare(task), Alone(), Observers(()))


def steps(run: Run) -> Iterator[None]:
    """The loop's own steps, one for each turn."""
    for lease, micro in run.loader.stream(run.ledger.leases(0, run.batch_size)):
        run.strategy.compute(micro)
        done = run.strategy.update()
        run.ledger.commit(lease, done.version)
        run.version = done.version
        yield


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def over(pauses: list[float], copies: list[float]) -> float:
    """The median over the rounds of the ratio within the round."""
    return round(median(pause / copy for pause, copy in zip(pauses, copies, strict=True)), 3)


class Memcpy:
    """Copies these tensors, or as many bytes in one piece."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.size = sum(tensor.nbytes for tensor in tensors)
        self._from = torch.ones(self.size, dtype=torch.uint8)
        self._to = torch.zeros(self.size, dtype=torch.uint8)

    def each(self) -> None:
        to = self._to.data_ptr()
        for tensor in self._tensors:
            ctypes.memmove(to, tensor.data_ptr(), tensor.nbytes)
            to += tensor.nbytes

    def flat(self) -> None:
        ctypes.memmove(self._to.data_ptr(), self._from.data_ptr(), self.size)


def pauses(run: Run, step: Iterator[None], rounds: int) -> dict[str, list[float]]:
    tensors = list(flatten(run.cut()).tensors.values())
    copier = Memcpy(tensors)
    print(f"{copier.size / 1e9:.2f} GB in {len(tensors)} tensors", flush=True)
    works = {"memcpy": copier.each, "flat": copier.flat, "pause": run.save}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            next(step)
            found[name].append(seconds(work))
            run.writer.flush()
    return found


def disturbance(run: Run, step: Iterator[None]) -> tuple[list[float], list[float], float]:
    """Steps while nothing is written, steps while a checkpoint is, and how long that took."""
    at_rest = [seconds(lambda: next(step)) for _ in range(STEPS)]
    run.save()
    began, busy = time.perf_counter(), []
    while run.writer.busy:
        busy.append(seconds(lambda: next(step)))
    return at_rest, busy, time.perf_counter() - began


def measure(folder: Path, rounds: int) -> dict[str, float]:
    run = built()
    run.shelf.folder = folder
    step = steps(run)
    with run.writer:
        for _ in range(WARM):
            next(step)
        run.writer.prepare(run.strategy.state_dict())
        run.writer.flush()
        found = pauses(run, step, rounds)
        for name, times in found.items():
            print(f"{name:8} {median(times) * 1e3:7.0f} ms   best {min(times) * 1e3:.0f}")
        at_rest, busy, written = disturbance(run, step)
    slower = median(busy) / median(at_rest)
    print(
        f"steps    {median(at_rest) * 1e3:7.0f} ms, {median(busy) * 1e3:.0f} while written "
        f"({written:.1f} s, {len(busy)} steps)"
    )
    return {
        "pause_over_memcpy": over(found["pause"], found["memcpy"]),
        "pause_over_flat": over(found["pause"], found["flat"]),
        "pause_ms": round(median(found["pause"]) * 1e3, 1),
        "step_while_writing": round(slower, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(json.dumps(measure(Path(folder), given.rounds)))


if __name__ == "__main__":
    main()
