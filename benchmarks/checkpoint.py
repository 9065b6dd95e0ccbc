"""Claim: a checkpoint stops training for little longer than it takes to copy its state in memory.

A gpt of about 100 million parameters is trained with adam: weights and two moments of each, 1.2 GB
in 600 tensors. Measured in turns, each after an update and with the disk at rest:

    pause    how long `Run.save` keeps the loop waiting, whatever of it goes to disk later
    memcpy   the same number of bytes by the C library's memcpy from one piece of memory into
             another, both touched before, in as many threads as training has
    each     memcpy of one tensor after another from where they are, in one thread
Then steps are timed while nothing is being written, and while a checkpoint is.

    python benchmarks/checkpoint.py [--rounds N] [--folder DIR] [--threads N]

The last line is JSON: {"pause_over_memcpy": median over the rounds of pause / memcpy, …}.
Goal: at most 1.5.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from echelon import cross_entropy
from echelon.checkpoint.tree import flatten
from echelon.comm import Alone
from echelon.core.config import job_from
from echelon.core.task import Task
from echelon.loop.assemble import assemble
from echelon.loop.run import Run
from echelon.models.gpt import GPT, GPTOptions
from echelon.task import prepare
from echelon.track import Observers

VOCABULARY, CONTEXT, TEXTS = 2048, 32, 4096
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
            "batch_size": 4,
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


class Memcpy:
    """Copies as much as the state has."""

    def __init__(self, tensors: list[Tensor], threads: int) -> None:
        self._tensors = tensors
        self.size = sum(tensor.nbytes for tensor in tensors)
        self._from = torch.ones(self.size, dtype=torch.uint8)
        self._to = torch.zeros(self.size, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(threads)
        self._part = -(-self.size // threads)

    def whole(self) -> None:
        starts = range(0, self.size, self._part)
        list(self._pool.map(self._copy, starts))

    def each(self) -> None:
        to = self._to.data_ptr()
        for tensor in self._tensors:
            ctypes.memmove(to, tensor.data_ptr(), tensor.nbytes)
            to += tensor.nbytes

    def _copy(self, start: int) -> None:
        size = min(self._part, self.size - start)
        ctypes.memmove(self._to.data_ptr() + start, self._from.data_ptr() + start, size)


def pauses(run: Run, step: Iterator[None], rounds: int, threads: int) -> dict[str, list[float]]:
    tensors = list(flatten(run.cut()).tensors.values())
    copier = Memcpy(tensors, threads)
    print(f"{copier.size / 1e9:.2f} GB in {len(tensors)} tensors, {threads} threads", flush=True)
    works = {"memcpy": copier.whole, "each": copier.each, "pause": run.save}
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


def measure(folder: Path, rounds: int, threads: int) -> dict[str, float]:
    run = built()
    run.shelf.folder = folder
    step = steps(run)
    with run.writer:
        for _ in range(WARM):
            next(step)
        run.writer.prepare(run.strategy.state_dict())
        run.writer.flush()
        found = pauses(run, step, rounds, threads)
        for name, times in found.items():
            print(f"{name:8} {median(times) * 1e3:7.0f} ms   best {min(times) * 1e3:.0f}")
        at_rest, busy, written = disturbance(run, step)
    ratios = [pause / copy for pause, copy in zip(found["pause"], found["memcpy"], strict=True)]
    slower = median(busy) / median(at_rest)
    print(
        f"steps    {median(at_rest) * 1e3:7.0f} ms, {median(busy) * 1e3:.0f} while written "
        f"({written:.1f} s, {len(busy)} steps)"
    )
    return {
        "pause_over_memcpy": round(median(ratios), 3),
        "pause_ms": round(median(found["pause"]) * 1e3, 1),
        "memcpy_ms": round(median(found["memcpy"]) * 1e3, 1),
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
        print(json.dumps(measure(Path(folder), given.rounds, given.threads)))


if __name__ == "__main__":
    main()
