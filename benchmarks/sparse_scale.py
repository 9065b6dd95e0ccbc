"""Claim: a click log of a hundred million different ids is trained within 12 GB in all.

The log is made up while it is read. A record has eight ids that occur in no other one, and four
from fields of a thousand ids each, the common ones far more often than the rare; every id has an
effect of its own, but only the latter come often enough to be learnt. The chance of a click is
known, and so is the best AUC on held-out records. Ids are anything: 64 bits, as if hashed.

Trained is `strategy: parameter_server` as a run of its own: one trainer, servers that share the
table (eight numbers an id, row-wise adagrad), coordinator and supervisor. Measured is the sum of
the proportional set sizes (Pss: pages that k processes share count 1/k each) of all of them, twice
a second, from the start until the last checkpoint, which holds all rows, is on disk.

    python benchmarks/sparse_scale.py [--ids 1_000_000] [--servers 2] [--batch 8192]

The last line is JSON: {"peak_gb": …, "auc": …, "rows": …, "seconds": …, "ids": …, "best_auc": …,
"ids_per_s": …}. Goal: 100,000,000 ids, peak_gb ≤ 12.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import echelon
from echelon.core.hashing import words
from echelon.core.interfaces import Task
from echelon.core.types import Batch, RowRule
from echelon.data.synthetic import auc
from echelon.models import Table
from echelon.task.metrics import AUC

RARE, COMMON, VOCABULARY, WIDTH = 8, 4, 1000, 8
HELD_OUT = 50_000
EVERY = 0.5
GB = 1e9


class Log:
    """Records [first, first + size) of an endless log, each a pure function of its number."""

    def __init__(self, first: int, size: int) -> None:
        self._first, self._size = first, size
        random = np.random.default_rng(5)
        self._effects = random.standard_normal((COMMON, VOCABULARY)) * 1.2
        weights = 1 / np.arange(1, VOCABULARY + 1)
        self._bounds = np.cumsum(weights / weights.sum())

    def __len__(self) -> int:
        return self._size

    def gather(self, rows: Tensor) -> Batch:
        numbers = rows.numpy() + self._first
        common = self._common(numbers)
        rare = words((numbers[:, None] * RARE + np.arange(RARE)).view(np.uint64).reshape(-1), 1)
        fields = words((common + VOCABULARY * np.arange(COMMON)).view(np.uint64).reshape(-1), 2)
        ids = [part.view(np.int64).reshape(len(numbers), -1) for part in (rare, fields)]
        clicked = _uniform(numbers, 9) < self.chance(common)
        return {
            "ids": torch.from_numpy(np.concatenate(ids, 1)),
            "y": torch.from_numpy(clicked.astype(np.float32)),
        }

    def chances(self) -> tuple[Any, Any]:
        """What is to be known of every record, and whether it was a click."""
        numbers = np.arange(self._first, self._first + self._size)
        chance = self.chance(self._common(numbers))
        return chance, _uniform(numbers, 9) < chance

    def chance(self, common: Any) -> Any:
        logit = self._effects[np.arange(COMMON), common].sum(1) - 1
        return 1 / (1 + np.exp(-logit))

    def _common(self, numbers: Any) -> Any:
        drawn = np.stack([_uniform(numbers, 20 + field) for field in range(COMMON)], 1)
        return np.minimum(np.searchsorted(self._bounds, drawn), VOCABULARY - 1)


def _uniform(numbers: Any, key: int) -> Any:
    return (words(numbers.view(np.uint64), key) >> np.uint64(11)) * 2.0**-53


class Clicks(nn.Module):
    """A vector for every id, side by side, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = Table("ids", WIDTH, std=0.01, rule=RowRule(name="adagrad", lr=0.05))
        self.layers = nn.Sequential(
            nn.Linear((RARE + COMMON) * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.vectors(ids).flatten(1))
        return scores.squeeze(1)


def train(ids: int, servers: int, batch: int) -> None:
    """The run itself, in a process of its own."""
    records = ids // RARE
    result = echelon.train(
        Task(
            model=Clicks,
            loss=echelon.binary_cross_entropy,
            train=Log(0, records),
            valid=Log(records, HELD_OUT),
            forward=lambda model, found: model(found["ids"]),
            metrics={"auc": AUC()},
        ),
        strategy="parameter_server",
        workers=1,
        parameter_server={"servers": servers},
        batch_size=batch,
        epochs=1,
        optimizer={"name": "adam", "lr": 1e-3},
        checkpoint={"every": "never", "best": False},
        threads=1,
        seed=0,
    )
    print(json.dumps({"auc": result.metrics["auc"], "folder": str(result.folder)}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ids", type=lambda text: int(text.replace("_", "")), default=100_000_000)
    options.add_argument("--servers", type=int, default=2)
    options.add_argument("--batch", type=int, default=8192)
    options.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.inner:
        train(chosen.ids, chosen.servers, chosen.batch)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = watched(folder, sys.argv[1:])
    chance, clicked = Log(chosen.ids // RARE, HELD_OUT).chances()
    found |= {"ids": chosen.ids, "best_auc": round(auc(chance, clicked), 4)}
    found["ids_per_s"] = round(chosen.ids / found["seconds"])
    print(json.dumps(found))


def watched(folder: str, arguments: list[str]) -> dict[str, Any]:
    """Train in another session, and add up what all of its processes hold."""
    command = [sys.executable, str(Path(__file__).resolve()), "--inner", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begin, peak = time.monotonic(), 0
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            while process.poll() is None:
                peak = max(peak, held(process.pid))
                time.sleep(EVERY)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    said = json.loads(lines[-1])
    return {
        "peak_gb": round(peak / GB, 2),
        "auc": round(said["auc"], 4),
        "rows": rows_on_disk(Path(folder) / said["folder"]),
        "seconds": round(time.monotonic() - begin),
    }


def held(session: int) -> int:
    """Bytes of all processes of a session."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    total += _pss(entry / "smaps_rollup")
            except (OSError, ValueError):  # it has just ended
                continue
    return total


def _pss(rollup: Path) -> int:
    for line in rollup.read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def rows_on_disk(folder: Path) -> int:
    """How many rows the last checkpoint has: it keeps them beside its other tensors."""
    newest = max((folder / "checkpoints").glob("step-*"))
    spooled = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["spooled"]
    return next(int(v["shape"][0]) for name, v in spooled.items() if name.endswith("vectors.ids"))


if __name__ == "__main__":
    main()
