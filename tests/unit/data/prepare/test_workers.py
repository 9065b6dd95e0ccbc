"""Worker processes: results that are stored already, errors, and a worker that is killed."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from echelon.data.prepare import recipe_from
from echelon.data.prepare.workers import Task, WorkerError, Workers


@pytest.mark.timeout(60)
def test_stored_results_errors_and_a_killed_worker(tmp_path: Path) -> None:
    recipe = recipe_from({"read": "x", "keep": ["t"], "write": {"folder": "o"}})
    setting = {"recipe": recipe.values(), "desk": str(tmp_path)}
    with closing(Workers(1, setting)) as pool:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "000000.json").write_text("[1]")  # was done before
        assert list(pool.map([Task("known", {"stage": "s", "number": 0})])) == [[1]]
        odd = Task("odd", {"stage": "s", "number": 1, "do": "odd"})
        with pytest.raises(WorkerError, match="odd: AssertionError") as raised:
            list(pool.map([odd]))
        assert "Traceback" in raised.value.__notes__[0]
    with closing(Workers(1, setting)) as pool:
        os.kill(pool._hands[0].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker 0 was killed by SIGKILL .* at: odd"):
            list(pool.map([odd]))
