"""Event files for TensorBoard, in the run's folder: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from echelon.track.text import to_json


class TensorBoard:
    """Writes scalars `train/…` and `valid/…`, and what the run is as text."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._writer = SummaryWriter(str(self._folder))
        self._text("run", f"{run}\n\n```json\n{to_json(facts)}\n```", 0)

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars("train", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars("valid", step, values)

    def noticed(self, step: int, message: str) -> None:
        self._text("notices", message, step)

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._text("result", f"{status}\n\n```json\n{to_json(summary)}\n```", 0)
            self._writer.close()
            self._writer = None

    def _scalars(self, part: str, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "started comes first"
        for name, value in values.items():
            self._writer.add_scalar(f"{part}/{name}", value, step)

    def _text(self, tag: str, text: str, step: int) -> None:
        assert self._writer is not None, "started comes first"
        self._writer.add_text(tag, text, step)
