"""What is tried on a Ray cluster of two nodes, in a process of its own.

python ray_trial.py RECIPE SIZE: prepares in blocks of SIZE; the last line is what was seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import ray_constants
from ray.cluster_utils import Cluster

import echelon
from echelon.core.errors import EchelonError
from echelon.data.prepare import engine, prepare
from echelon.data.prepare.on_ray import arguments, ask_nodes, below, check_here, children
from echelon.data.prepare.workdir import Desk


class Killing:
    """Watches; kills a worker in the midst of it."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.nodes: set[int] = set()

    def began(self, _what: str, _total: int | None) -> None: ...

    def advanced(self, done: int) -> None:
        found = hands()
        self.nodes |= set(found.values())
        if done == 2 and found and not self.killed:
            self.killed.append(min(found))
            os.kill(self.killed[0], signal.SIGKILL)

    def ended(self) -> None: ...


def hands() -> dict[int, int]:
    """Workers of ours that Ray runs, and the process of the node of each."""
    found = {}
    for node in below(children(os.getpid())):
        for pid in children(node):
            if "Hand" in arguments(pid):
                found[pid] = node
    return found


def gone(seconds: float = 20.0) -> bool:
    """Whether they end."""
    deadline = time.monotonic() + seconds
    while hands() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not hands()


def told(do: Callable[[], Any]) -> str:
    try:
        do()
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unseen() -> None:
    """Every node is asked for a desk that it does not see."""
    ask_nodes(partial(check_here, echelon.__version__, Desk(Path("/nowhere")), "token", "1", []))


@contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """Two nodes of one core."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # listen on loopback alone
    settings = {"num_cpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
    with tempfile.TemporaryDirectory(
        prefix="echelon-trial-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        nodes = Cluster()
        try:
            nodes.add_node(**settings, temp_dir=folder)
            nodes.add_node(**settings)
            yield nodes.address, folder
        finally:
            ray.shutdown()
            nodes.shutdown()


def main() -> None:
    recipe = yaml.safe_load(Path(sys.argv[1]).read_text())
    vars(engine).update(SIZE=int(sys.argv[2]))
    watch = Killing()
    with cluster() as (address, mark):
        done = prepare(recipe, on=f"ray:{address}", watch=watch)
        left = ray.is_initialized() or not gone()
        ray.init(address=address, log_to_driver=False)  # as somebody who uses Ray already
        bad = told(partial(prepare, {**recipe, "bad": "refuse"}, on="ray", overwrite=True))
        other = told(partial(prepare, recipe, on="ray:local", overwrite=True))
        nowhere = told(unseen)
        kept = ray.is_initialized() and gone()
    seen = {
        "out": done.counts["out"],
        "killed": len(watch.killed),
        "nodes": len(watch.nodes),
        "left": left,
        "bad": bad,
        "other": other,
        "nowhere": nowhere,
        "kept": kept,
        "mark": mark,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
