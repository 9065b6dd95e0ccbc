"""Claim: members of `strategy: sharded` hold what the arithmetic says, and no more.

A gpt of about 100 million parameters is trained for three steps with adam by four members, in fresh
processes for all_reduce and for each level of sharded. With P parameters, members that are n hold

    all_reduce   weights P     gradients P     adam 2 P        = 4 P numbers of 4 bytes
    optimizer    weights P     gradients P     adam 2 P / n
    gradients    weights P     gradients P/n   adam 2 P / n
    parameters   weights P/n   gradients P/n   adam 2 P / n

Measured is, per member, the highest proportional set size (Pss in /proc/self/smaps_rollup: resident
pages, those shared by k processes counted 1/k) of a sample every 20 ms from before the model is
built until after the last step, less the Pss before. By then members have met and have trained a
model of a few kilobytes in the same way, so that code and tables are there already. `peak_mb` is
the mean over the members; what one has more of a shared page another has less.

Context and vocabulary are small (16 tokens, one text per member, 2,048 words), so that activations
are a few MB: what is left beside the arithmetic is what backward makes before it can be divided,
a layer's whole gradient at a time, and, at the level of parameters, a layer's whole weights.

    python benchmarks/memory.py [--only LEVEL]

The last line is JSON: {"peak_mb": {...}, "worst_error": largest |measured / expected - 1|}.
Goal: within 0.15.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from echelon import cross_entropy
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.comm.group import Group
from echelon.core.config import OptimizerSection, ScheduleSection
from echelon.core.config.sections import ShardedSection
from echelon.core.interfaces import Task
from echelon.core.types import Numerics, Parallel
from echelon.models.gpt import GPT, GPTOptions
from echelon.optim import build_schedule
from echelon.strategy import build

MEMBERS, STEPS, EVERY = 4, 3, 0.02
VOCABULARY, CONTEXT = 2048, 16
LARGE = GPTOptions(layers=14, heads=12, width=768)
TINY = GPTOptions(layers=1, heads=2, width=8)
MB = 1 << 20
DIVIDED = {
    "all_reduce": (1, 1, 1),
    "optimizer": (1, 1, MEMBERS),
    "gradients": (1, MEMBERS, MEMBERS),
    "parameters": (MEMBERS, MEMBERS, MEMBERS),
}
"""By how much weights, gradients and adam's two numbers per weight are divided."""


def expected_mb(name: str, parameters: int) -> float:
    weights, gradients, adam = DIVIDED[name]
    return 4 * parameters * (1 / weights + 1 / gradients + 2 / adam) / MB


def pss_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/smaps_rollup has no Pss")


class Peak:
    """The highest Pss while this is entered."""

    def __enter__(self) -> Peak:
        self.mb = self.before = pss_mb()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.mb = max(self.mb, pss_mb())


def train(name: str, options: GPTOptions, group: Group) -> int:
    """Three steps; how many parameters there are."""

    def gpt() -> GPT:
        torch.manual_seed(1)
        return GPT(VOCABULARY, CONTEXT, options)

    level: Any = "parameters" if name == "all_reduce" else name
    strategy = build(
        "all_reduce" if name == "all_reduce" else "sharded",
        Numerics(torch.device("cpu"), optimizer=OptimizerSection(name="adam", lr=1e-4)),
        build_schedule(ScheduleSection(), STEPS),
        parallel=Parallel(sharded=ShardedSection(level=level)),
    )
    strategy.setup(Task(gpt, cross_entropy), group)
    tokens = torch.randint(VOCABULARY, (1, CONTEXT + 1))
    for _ in range(STEPS):
        strategy.compute([{"x": tokens[:, :-1], "y": tokens[:, 1:]}])
        assert strategy.update().committed
    return sum(parameter.numel() for parameter in strategy.model.parameters())


def measure(name: str) -> dict[str, float]:
    """What this kind of member holds, on average over them."""

    def body(member: Member) -> dict[str, Any]:
        torch.set_num_threads(1)
        group = Group(member.place)
        try:
            train(name, TINY, group)
            with Peak() as peak:
                parameters = train(name, LARGE, group)
            found = torch.zeros(MEMBERS, dtype=torch.float64)
            found[group.index] = peak.mb - peak.before
            group.collective().sum_(found)
            return {"members": found.tolist(), "parameters": parameters}
        finally:
            group.close()

    return launch(MEMBERS, body, deadline=300.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=DIVIDED, help="measure one kind, in this process")
    only = parser.parse_args().only
    if only:
        print(json.dumps(measure(only)))
        return
    peaks, errors = {}, []
    for name in DIVIDED:
        started = time.perf_counter()
        command = [sys.executable, __file__, "--only", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        wanted = expected_mb(name, found["parameters"])
        peaks[name] = sum(found["members"]) / MEMBERS
        errors.append(peaks[name] / wanted - 1)
        each = " ".join(f"{mb:.0f}" for mb in found["members"])
        print(
            f"{name:11} {peaks[name]:7.0f} MB, expected {wanted:6.0f}: {errors[-1]:+.1%}"
            f"   (members {each}; {time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    print(
        json.dumps(
            {
                "peak_mb": {name: round(mb, 1) for name, mb in peaks.items()},
                "worst_error": round(max(map(abs, errors)), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
