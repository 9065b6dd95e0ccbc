"""Strategies are one line apart: what one began, any other goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import echelon

from .command import final_weights
from .test_workers import difference, killed

pytestmark = pytest.mark.timeout(300)

JOB: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32, 32]},
    "optimizer": {"name": "adam", "lr": 1e-3, "eps": 1e-5},
    "schedule": {"name": "cosine", "steps": 200},
    "clip": {"norm": 1.0},
    "batch_size": 100,
    "threads": 1,
    "track": {"report": False},
    "quiet": True,
}
WAYS: list[dict[str, Any]] = [
    {"strategy": "all_reduce", "workers": 4},
    {"strategy": "sharded", "workers": 2},
    {"strategy": "pipeline", "workers": 2},
    {"strategy": "sharded", "workers": 3, "sharded": {"level": "optimizer"}},
    {"strategy": "tensor", "workers": 2},
    {"strategy": "sharded", "workers": 2, "sharded": {"level": "gradients"}},
    {"strategy": "pipeline", "mesh": {"data": 2, "pipeline": 2}},
    {"strategy": "single", "workers": 1},
]


def test_a_run_goes_on_under_every_strategy_and_size_and_ends_where_one_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    monkeypatch.chdir(alone)
    one = echelon.train("classify", **JOB, epochs=len(WAYS))
    monkeypatch.chdir(together)
    first, *rest = WAYS
    run = echelon.train("classify", **JOB, epochs=1, **first).run
    for epochs, way in enumerate(rest, 2):
        last = echelon.train("classify", **JOB, epochs=epochs, resume=run, **way)
    assert last.samples == one.samples == len(WAYS) * 1438
    assert difference(final_weights(together), final_weights(alone)) < 1e-3
    assert last.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["sharded", "pipeline", "tensor"])
def test_a_killed_member_is_named_under_every_strategy(tmp_path: Path, name: str) -> None:
    pid, errors = killed(tmp_path, f"strategy={name}", "workers=2")
    assert f"error: member 1 of 2 (pid {pid} on " in errors.splitlines()[-1]
    assert "was killed by signal 9 (SIGKILL)" in errors
    assert "Traceback" not in errors
