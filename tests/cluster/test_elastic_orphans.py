"""Runs that lose members at their very beginning, at their end, or all of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from echelon.track import Store
from tests.cluster.elastic import RUN, STEPS, TASK, difference, join, proved, running
from tests.e2e.command import DEADLINE, shelf, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_joined_brings_the_run_to_its_end(
    tmp_path: Path, number: int, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, "--json", workers=2) as run:
        run.reach(5)
        with join(tmp_path) as newcomer:
            run.wait("joined", member=2)
            run.go()
            formed = run.wait("generation", number=2)
            assert formed["members"] == [0, 1, 2]
            os.kill(run.pid(0), signal.SIGKILL)
            os.kill(run.pid(1), number)  # one that is frozen never hears of the end
            os.kill(run.said("coordinator")[-1]["pid"], signal.SIGKILL)
            output, _ = run.end(0)
            newcomer.communicate(timeout=DEADLINE)
    assert newcomer.returncode == 0
    assert json.loads(output.splitlines()[-1])["status"] == "done"
    assert run.said("generation")[-1]["members"] == [2]
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


@pytest.mark.parametrize("member", [0, 1])
def test_one_that_is_lost_before_the_first_step_is_done_without(
    tmp_path: Path, member: int, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, workers=3) as run:
        run.go()
        run.wait("joined", member=member)
        os.kill(run.pid(member), signal.SIGKILL)
        run.end(0)
    assert run.said("lost", member=member, how="killed")
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


# Who comes to the evaluation, which is the last thing of all, says so and waits for `go`.
HELD_UP = """
import time
from pathlib import Path

def forward(model, batch):
    if not model.training:
        Path("evaluates").touch()
        while not Path("go").exists():
            time.sleep(0.005)
    time.sleep(0.008)
    return model(batch["x"])
"""


def test_a_leader_that_comes_back_too_late_does_not_change_what_is_on_record(
    tmp_path: Path,
) -> None:
    held_out = 'valid={"x": x[:60], "y": x[:60, :3].argmax(1)},'
    task = TASK.replace("forward=forward,", f"forward=forward, {held_out}")
    (tmp_path / "held_up.py").write_text(HELD_UP + task)
    with running(tmp_path, "task=held_up.py:task", "evaluate.every=1000", workers=2) as run:
        run.reach(5)
        os.kill(run.pid(0), signal.SIGSTOP)
        wait_for((tmp_path / "evaluates").exists, run.command)
        os.kill(run.pid(0), signal.SIGCONT)
        run.wait("joined", member=2, pid=run.pid(0))
        run.go()
        run.end(0)
    found = Store(tmp_path / "runs").run(RUN)
    assert (found.status, found.summary["steps"]) == ("done", STEPS)
    assert len(run.said("lost", member=0, how="frozen")) == 1


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


@pytest.mark.parametrize("member", [0, 1])
def test_one_that_misses_the_first_meeting_is_taken_in_later(
    tmp_path: Path, member: int, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, workers=3) as run:
        run.wait("joined", member=member)
        os.kill(run.pid(member), signal.SIGSTOP)
        run.wait("lost", member=member)
        os.kill(run.pid(member), signal.SIGCONT)
        run.wait("joined", member=3)
        formed = run.wait("generation", members=[*sorted({0, 1, 2} - {member}), 3])
        assert formed
        run.go()
        run.end(0)
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


@pytest.mark.parametrize("member", [0, 1])
def test_too_few_to_go_on_leave_their_last_update_whoever_was_lost(
    tmp_path: Path, member: int
) -> None:
    few = ["elastic.min_workers=2", "elastic.wait=1"]
    with running(tmp_path, *few, workers=2) as run:
        run.reach(5)
        os.kill(run.pid(member), signal.SIGKILL)
        run.end(1)
    last = run.said("finished")[-1]["version"]
    assert last >= 5
    assert shelf(tmp_path, RUN).versions() == [last]
