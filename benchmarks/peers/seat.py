"""One process of one side for one round; `python -m peers.seat`, started by `crew`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from . import together
from .clock import Clock
from .work import WORKS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=together.SIDES)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, help="where to write rate and loss; rank 0 alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock(chosen.warmup, chosen.steps)
    loss = together.SIDES[chosen.side](WORKS[chosen.work](chosen.data), clock)
    if chosen.side not in together.STARTS_ITSELF:
        check(loss)
    if chosen.result is not None:
        chosen.result.write_text(json.dumps({"rate": clock.rate, "loss": loss}), encoding="utf-8")
    if chosen.side not in together.STARTS_ITSELF:
        leave()


def leave() -> None:
    """All is done and written: do not let torch's gloo threads, which now and then abort a process
    that takes them down, undo it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def check(loss: float) -> None:
    """Ranks that have trained one model together end on one loss."""
    assert dist.get_world_size() == together.MEMBERS, f"{dist.get_world_size()} ranks"
    extremes = torch.tensor([loss, -loss])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least = extremes[0], -extremes[1]
    assert most == least, f"the ranks ended on losses from {least} to {most}"


if __name__ == "__main__":
    main()
