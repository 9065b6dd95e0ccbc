"""Runs in Weights & Biases: offline in the run's folder, unless the user is logged in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

_PROJECT = "echelon"


class Wandb:
    """Quiet, and without W&B's capture of the terminal: progress is told elsewhere."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._run: Any = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        # None leaves the choice to W&B, which knows its own settings.
        mode = None if wandb.login(prompt=False) else "offline"
        self._run = wandb.init(
            project=_PROJECT,
            name=run,
            dir=str(self._folder),
            config=dict(facts),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"valid/{name}": value for name, value in values.items()}, step=step)

    def noticed(self, step: int, message: str) -> None:
        self._run.alert(title="Echelon", text=f"step {step}: {message}")

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update({"status": status, **summary})
            self._run.finish(exit_code=0 if status == "done" else 1)
