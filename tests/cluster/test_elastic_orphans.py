"""Runs whose own members are all lost: those who joined go on, and without any it is over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from tests.cluster.elastic import difference, join, proved, running
from tests.e2e.command import DEADLINE

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]


def test_whoever_joined_brings_the_run_to_its_end(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, "--json", workers=2) as run:
        run.reach(5)
        with join(tmp_path) as newcomer:
            run.wait("joined", member=2)
            run.go()
            formed = run.wait("generation", number=2)
            assert formed["members"] == [0, 1, 2]
            for member in (0, 1):
                os.kill(run.pid(member), signal.SIGKILL)
            os.kill(run.said("coordinator")[-1]["pid"], signal.SIGKILL)
            output, _ = run.end(0)
            newcomer.communicate(timeout=DEADLINE)
    assert newcomer.returncode == 0
    assert json.loads(output.splitlines()[-1])["status"] == "done"
    assert run.said("generation")[-1]["members"] == [2]
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_a_run_without_anybody_is_over_and_says_who_was_the_last(tmp_path: Path) -> None:
    with running(tmp_path, workers=2) as run:
        run.reach(5)
        os.kill(run.pid(0), signal.SIGKILL)
        run.wait("lost", member=0)
        os.kill(run.pid(1), signal.SIGKILL)
        _, errors = run.end(1)
    last = errors.splitlines()[-1]
    assert last.startswith("error: member 1 of 2 (pid ")
    assert "killed by signal 9" in last
    assert run.said("finished", status="failed")[0]["why"] == "no member is left"
