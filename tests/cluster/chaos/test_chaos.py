"""`echelon chaos` as a person uses it: real runs, real faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import echelon, start

pytestmark = pytest.mark.usefixtures("forked_commands")

DEADLINE = 280.0
# Smooth, so that rounding is not amplified, and long enough for a newcomer to be in time.
JOB = """
name: digits
data: {name: digits}
model: {name: mlp, hidden: [64], activation: tanh}
optimizer: {name: sgd, lr: 0.05}
batch_size: 64
threads: 1
track: {report: false}
"""


def chaos(folder: Path, *arguments: str, epochs: int) -> dict[str, Any]:
    """The command's report; it has to succeed."""
    (folder / "job.yaml").write_text(JOB)
    words = ("chaos", "job.yaml", f"epochs={epochs}", "--workers", "3", *arguments, "--json")
    with start(*words, folder=folder) as command:
        output, errors = command.communicate(timeout=DEADLINE)
    assert output, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert command.returncode == 0, json.dumps(found, indent=1) + errors
    return found


@pytest.mark.timeout(300)
def test_random_faults_cost_neither_a_sample_nor_the_result(tmp_path: Path) -> None:
    found = chaos(tmp_path, "--random", "10", "--seed", "7", epochs=160)
    (trial,) = found["trials"]
    assert (found["ok"], found["finished"], found["exactly_once"]) == (True, 1, 1)
    assert len(trial["faults"]) == 10
    assert found["faults"] >= 5, "most of them happened"
    assert trial["left_behind"] == []
    assert trial["steps"] == found["reference"]["steps"] == 160 * 23
    assert trial["unlike"] is None
    assert trial["weight_difference"] <= 1e-4
    assert trial["metrics"] == pytest.approx(found["reference"]["metrics"], abs=1e-3)


@pytest.mark.timeout(300)
def test_every_kind_of_fault_is_seen_and_survived(tmp_path: Path) -> None:
    plan = (
        "tear checkpoint@step=100; fill disk@step=150 for 0.5s; kill trainer:1@step=400; "
        "kill coordinator@step=500; join 1@step=500; slow trainer:2@step=600 by 3x for 1s; "
        "freeze trainer:2@step=1200 for 3s; partition leader@step=2000 for 3s; "
        "kill trainer:9@step=100; kill trainer:1@step=3000"
    )
    found = chaos(tmp_path, "--plan", plan, "--no-reference", epochs=250)
    (trial,) = found["trials"]
    faults = {fault["fault"].partition("@")[0]: fault for fault in trial["faults"]}
    assert "torn" in faults["tear checkpoint"]["note"]
    assert faults["kill trainer:9"]["skipped"].startswith("there is no member 9 (there are ")
    by_step = {fault["fault"]: fault for fault in trial["faults"]}
    assert by_step["kill trainer:1@step=3000"]["skipped"].startswith("member 1 is lost already")
    assert by_step["kill trainer:1@step=400"]["detected_s"] < 30
    assert by_step["kill trainer:1@step=400"]["recovered_s"] < 60
    assert faults["kill coordinator"]["recovered_s"] < 60
    assert faults["freeze trainer:2"]["detected_s"] is not None
    assert faults["partition leader"]["detected_s"] is not None
    assert found["exactly_once"] == 1
    shown = echelon("runs", "ledger", trial["run"], "--verify", folder=tmp_path)
    assert shown.returncode == 0, shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what is to go wrong: either --plan TEXT or --random N"),
        (["--random", "3", "--plan", "join 1@step=1"], "either --plan TEXT or --random N"),
        (["--plan", "join 1@step=1", "--runs", "2"], "--runs is for random faults"),
        (["--plan", "shoot trainer@step=1"], "plan, character 1: fault 'shoot' is unknown"),
        (["--random", "3", "strategy=pipeline", "workers=2"], "strategy 'pipeline' cannot do"),
        (["--random", "3", "workers=1"], "workers = 1: chaos needs at least 2"),
        (["--random", "3", "workers=2", "epochs=null", "minutes=1"], "set epochs or steps"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = echelon("chaos", "job.yaml", *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(300)
def test_a_run_that_cannot_begin_is_a_failure_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def task():\n    raise ValueError('no data today')\n")
    words = ("chaos", "task=mine.py:task", "workers=2", "--plan", "join 1@step=1")
    done = echelon(*words, folder=tmp_path)
    assert done.returncode == 1
    assert "the run did not start: " in done.stdout
    assert "no data today" in done.stdout
