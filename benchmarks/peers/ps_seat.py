"""One side for one round: `python -m peers.ps_seat SIDE …`; it starts its processes itself."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from .ps_job import Finding, Job


def echelon_pinned(job: Job) -> Finding:
    from . import ps_echelon as side

    return side.train(job, "memory")


def echelon_live(job: Job) -> Finding:
    from . import ps_echelon as side

    return side.train(job, "memory", weights="live")


def echelon_tcp(job: Job) -> Finding:
    from . import ps_echelon as side

    return side.train(job, "tcp")


def ceiling(job: Job) -> Finding:
    from . import ps_alone as side

    return side.train(job)


def tensorflow(job: Job) -> Finding:
    from . import ps_tensorflow as side

    return side.train(job)


def tensorflow_10(job: Job) -> Finding:
    from . import ps_tensorflow as side

    return side.train(job, together=10)


def torch_rpc(job: Job) -> Finding:
    from . import ps_rpc as side

    return side.train(job)


def torch_rpc_cma(job: Job) -> Finding:
    from . import ps_rpc as side

    return side.train(job, "cma")


def ray(job: Job) -> Finding:
    from . import ps_ray as side

    return side.train(job)


SIDES: dict[str, Callable[[Job], Finding]] = {
    side.__name__: side
    for side in (
        *(echelon_live, echelon_pinned, echelon_tcp, ceiling),
        *(tensorflow, tensorflow_10, torch_rpc, torch_rpc_cma, ray),
    )
}
_NEEDS = {"tensorflow": "tensorflow", "tensorflow_10": "tensorflow", "ray": "ray"}


def installed(side: str) -> bool:
    return side not in _NEEDS or importlib.util.find_spec(_NEEDS[side]) is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(chosen.data, Path(folder), chosen.warmup, chosen.steps)
        found = SIDES[chosen.side](job)
    chosen.result.write_text(json.dumps(found._asdict()), encoding="utf-8")


if __name__ == "__main__":
    main()
