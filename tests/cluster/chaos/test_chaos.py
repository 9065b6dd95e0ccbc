"""`echelon chaos` as a person uses it: real runs, real faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import echelon, start

pytestmark = pytest.mark.usefixtures("forked_commands")

DEADLINE = 280.0
# Smooth, so that rounding is not amplified; and no faster on a better machine, so that faults are
# noticed and newcomers are there before the end.
TASK = """
import time
import torch
from echelon import Task, cross_entropy

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

def forward(model, batch):
    if model.training:
        time.sleep(0.003)
    return model(batch["x"])

def task():
    x = torch.randn(700, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return Task(
        model=model, loss=cross_entropy, forward=forward,
        train={"x": x[:600], "y": y[:600]}, valid={"x": x[600:], "y": y[600:]},
    )
"""
JOB = """
name: mine
task: mine.py:task
optimizer: {name: momentum, lr: 0.05}
batch_size: 30
epochs: 100
threads: 1
track: {report: false}
"""
STEPS = 100 * 20


def chaos(folder: Path, *arguments: str) -> dict[str, Any]:
    """The command's report; it has to succeed."""
    write(folder)
    with start(
        "chaos", "job.yaml", "--workers", "3", *arguments, "--json", folder=folder
    ) as command:
        output, errors = command.communicate(timeout=DEADLINE)
    assert output, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert command.returncode == 0, json.dumps(found, indent=1) + errors
    return found


def write(folder: Path) -> None:
    (folder / "mine.py").write_text(TASK)
    (folder / "job.yaml").write_text(JOB)


def verified(folder: Path, run: str) -> None:
    shown = echelon("runs", "ledger", run, "--verify", folder=folder)
    assert shown.returncode == 0, shown.stdout


@pytest.mark.timeout(300)
def test_random_faults_cost_neither_a_sample_nor_the_result(tmp_path: Path) -> None:
    found = chaos(tmp_path, "--random", "10", "--seed", "7")
    (trial,) = found["trials"]
    assert (found["ok"], found["finished"], found["exactly_once"]) == (True, 1, 1)
    assert len(trial["faults"]) == 10
    assert found["faults"] >= 6, "most of them happened"
    assert trial["left_behind"] == []
    assert trial["steps"] == found["reference"]["steps"] == STEPS
    assert trial["unlike"] is None
    assert trial["weight_difference"] <= 1e-4
    assert trial["metrics"] == pytest.approx(found["reference"]["metrics"], abs=1e-4)
    verified(tmp_path, trial["run"])


@pytest.mark.timeout(300)
def test_every_kind_of_fault_is_seen_and_survived(tmp_path: Path) -> None:
    plan = (
        "tear checkpoint@step=60; fill disk@step=100 for 2s; kill trainer:1@step=700; "
        "kill coordinator@step=800; join 1@step=800; slow trainer:2@step=900 by 3x for 1s; "
        "freeze trainer:2@step=1100 for 8s; partition leader@step=1100+0.5s for 8s; "
        "kill trainer:9@step=100; kill trainer:1@step=1500"
    )
    found = chaos(tmp_path, "--plan", plan, "--no-reference")
    (trial,) = found["trials"]
    faults = {fault["fault"].partition(" for")[0]: fault for fault in trial["faults"]}
    assert "torn" in faults["tear checkpoint@step=60"]["note"]
    skipped = faults["kill trainer:9@step=100"]["skipped"]
    assert skipped.startswith("there is no member 9 (there are ")
    skipped = faults["kill trainer:1@step=1500"]["skipped"]
    assert skipped.startswith("member 1 is lost already")
    for fault in (
        "fill disk@step=100",
        "kill trainer:1@step=700",
        "kill coordinator@step=800",
        "freeze trainer:2@step=1100",
        "partition leader@step=1100+0.5s",
    ):
        assert faults[fault]["detected_s"] is not None, faults[fault]
        assert faults[fault]["recovered_s"] is not None, faults[fault]
    assert found["exactly_once"] == 1
    verified(tmp_path, trial["run"])


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
    write(tmp_path)
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
