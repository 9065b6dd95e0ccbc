"""A store and runs to look at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.track import Point, Store

FACTS: dict[str, Any] = {
    "task": "digits",
    "model": "mlp",
    "parameters": 4810,
    "samples": 1437,
    "total_steps": 200,
    "epochs": 4,
    "batch_size": 32,
    "strategy": "single",
    "workers": 1,
    "device": "cpu",
    "precision": "fp32",
}
CONFIG: dict[str, Any] = {"name": "digits", "epochs": 4, "optimizer": {"name": "adamw", "lr": 1e-3}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def facts() -> dict[str, Any]:
    return dict(FACTS)


@pytest.fixture
def trained(store: Store) -> Callable[..., str]:
    """Makes a run that is over: 200 steps, a figure every 2, an evaluation every 50."""

    def make(name: str = "digits", *, config: dict[str, Any] | None = None) -> str:
        run = store.create(name, CONFIG if config is None else config, FACTS)
        points = [
            Point(step, f"train/{key}", value, 1000.0 + step)
            for step in range(2, 201, 2)
            for key, value in (
                ("loss", 2.0 * math.exp(-step / 60)),
                ("lr", 1e-3),
                ("samples_per_s", 1600.0),
                ("epoch", float((step - 1) // 50)),
            )
        ]
        for step in range(50, 201, 50):
            points += [
                Point(step, "valid/loss", 2.2 * math.exp(-step / 60), 1000.0 + step),
                Point(step, "valid/accuracy", 1 - math.exp(-step / 50), 1000.0 + step),
            ]
        store.add_points(run, points)
        store.add_event(run, 100, "layer fc1: the gradient vanishes")
        store.finish(
            run,
            "done",
            {
                "run": run,
                "steps": 200,
                "samples": 6400,
                "seconds": 4.0,
                "metrics": {"loss": 0.0785, "accuracy": 0.9817},
                "best": {"metric": "accuracy", "value": 0.9817, "step": 200},
            },
        )
        return run

    return make


@pytest.fixture
def write_evaluation() -> Callable[[Path, dict[str, Any]], None]:
    def write(folder: Path, values: dict[str, Any]) -> None:
        (folder / "evaluation.json").write_text(json.dumps(values), encoding="utf-8")

    return write
