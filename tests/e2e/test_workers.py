"""A run of several processes: it ends where one process ends, and all of it ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import echelon as package
from echelon import Task, cross_entropy
from tests.cluster.shared import SOON

from .command import DEADLINE, echelon, final_weights, last_json, shelf, start, wait_for
from .forks import Command

pytestmark = pytest.mark.timeout(300)

PLAIN = [
    "task=classify",
    "data.name=digits",
    "model={name: mlp, hidden: [32]}",
    "optimizer={name: momentum, lr: 0.05}",
    "batch_size=50",
    "epochs=3",
    "threads=1",
    "track.report=false",
]
TWO = ["strategy=all_reduce", "workers=2"]
LONG = ["epochs=100000", "checkpoint.every=20", "evaluate.every=never"]


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).abs().max() / right[n].abs().max()) for n in left)


def members(supervisor: Command) -> list[int]:
    listed = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def status(folder: Path) -> tuple[str, str]:
    with sqlite3.connect(folder / "runs" / "echelon.db") as store:
        (found,) = store.execute("SELECT status, summary FROM runs").fetchall()
    store.close()
    return found  # type: ignore[no-any-return]


def test_two_workers_end_on_the_weights_and_figures_of_one(tmp_path: Path) -> None:
    found = []
    for name, settings in {"one": [], "two": TWO}.items():
        folder = tmp_path / name
        folder.mkdir()
        found.append(last_json(echelon("train", *PLAIN, *settings, "--json", "-q", folder=folder)))
    one, two = found
    assert difference(final_weights(tmp_path / "two"), final_weights(tmp_path / "one")) < 1e-4
    assert two["samples"] == one["samples"] == 3 * 1438
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-4)
    assert two["metrics"]["accuracy"] == pytest.approx(one["metrics"]["accuracy"], abs=1e-6)


def test_workers_go_on_with_what_one_process_began_and_back_again(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    last_json(echelon("train", *PLAIN, "--json", "-q", folder=whole))
    last_json(echelon("train", *PLAIN, "epochs=1", "--json", "-q", folder=parts))
    resume = ("train", "--resume", "last", "--json", "-q")
    last_json(echelon(*resume, "epochs=2", *TWO, folder=parts))
    back = ("epochs=3", "strategy=single", "workers=1")
    assert last_json(echelon(*resume, *back, folder=parts))["samples"] == 3 * 1438
    assert difference(final_weights(parts), final_weights(whole)) < 1e-4


def test_ctrl_c_ends_every_process_with_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    with start("train", *PLAIN, *TWO, *LONG, "-q", folder=tmp_path) as stopped:
        wait_for(lambda: shelf(tmp_path).versions(), stopped)
        pids = members(stopped)
        os.kill(stopped.pid, signal.SIGINT)
        output, errors = stopped.communicate(timeout=DEADLINE)
    assert stopped.returncode == 130, errors
    assert "stopped by SIGINT" in output
    assert "Traceback" not in errors
    assert gone(pids)
    steps = shelf(tmp_path).versions()[-1]
    resumed = echelon(
        *("train", "--resume", "last", "--json", "-q", f"steps={steps + 5}"), folder=tmp_path
    )
    assert last_json(resumed)["steps"] == steps + 5


def killed(folder: Path, *settings: str) -> tuple[int, str]:
    """A run whose second member is killed: the member's pid, and what is said of it."""
    given = (*PLAIN, *settings, *LONG, "elastic.enabled=false")
    with start("train", *given, "-q", folder=folder) as run:
        wait_for(lambda: shelf(folder).versions(), run)
        pids = members(run)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        _, errors = run.communicate(timeout=DEADLINE)
        took = time.monotonic() - began
    assert run.returncode == 1
    assert took < SOON
    assert gone(pids)
    return pids[1], errors


def test_a_killed_member_is_named_and_ends_the_run(tmp_path: Path) -> None:
    pid, errors = killed(tmp_path, *TWO)
    assert f"error: member 1 of 2 (pid {pid} on " in errors
    assert "was killed by signal 9 (SIGKILL)" in errors
    assert "step " in errors
    assert len(errors.splitlines()) == 1, errors
    state, summary = status(tmp_path)
    assert state == "failed"
    assert "member 1 of 2" in summary


def test_a_frozen_member_is_named_when_the_deadline_is_over(tmp_path: Path) -> None:
    settings = (*PLAIN, *TWO, *LONG, "sync.deadline=3", "elastic.enabled=false")
    with start("train", *settings, "-q", folder=tmp_path) as run:
        wait_for(lambda: shelf(tmp_path).versions(), run)
        pids = members(run)
        os.kill(pids[1], signal.SIGSTOP)
        _, errors = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1
    assert f"member 1 of 2 (pid {pids[1]} on " in errors
    assert "Traceback" not in errors
    assert gone(pids)


TASK = """
import os, torch
from echelon import Task, cross_entropy

def broken(model, batch):
    broken.calls += 1
    if broken.calls == 30 and torch.initial_seed() != 0:  # not the first member
        raise ZeroDivisionError("seven")
    return model(batch["x"])
broken.calls = 0

def task():
    x = torch.randn(200, 4)
    return Task(
        model=lambda: torch.nn.Linear(4, 2), loss=cross_entropy, forward=broken,
        train={"x": x, "y": (x.sum(1) > 0).long()},
    )
"""


def test_one_members_exception_is_shown_once_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    done = echelon("train", "task=mine.py:task", *TWO, "epochs=1000", "-q", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ZeroDivisionError: seven") == 2  # the traceback's end, and the error
    assert "error: member 1 of 2" in done.stderr
    assert "step 30" in done.stderr


def test_a_users_mistake_is_one_line_however_many_make_it(tmp_path: Path) -> None:
    done = echelon("train", *PLAIN, *TWO, "batch_size=1", folder=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "batch_size = 1: 2 members share each batch" in done.stderr
    done = echelon("train", *PLAIN, *TWO, "sync.skip_init=[nope]", folder=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "parameter 'nope' is unknown" in done.stderr


def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    settings = [*PLAIN, "strategy=all_reduce", "--json", "-q"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--log-dir", str(tmp_path / "torchrun")]  # it leaves it behind
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "echelon", "train", *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    found = last_json(done)
    assert len(done.stdout.splitlines()) == 1, "only one member speaks"
    assert found["samples"] == 3 * 1438
    alone = tmp_path / "alone"
    alone.mkdir()
    last_json(echelon("train", *PLAIN, "--json", "-q", folder=alone))
    assert difference(final_weights(tmp_path), final_weights(alone)) < 1e-4


@pytest.mark.parametrize("strategy", ["all_reduce", "sharded", "pipeline"])
def test_from_python_with_functions_that_only_exist_there(strategy: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(101, 4)
    y = (x.sum(1) > 0).long()
    first = torch.nn.Linear(4, 8)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(8, 2))
    before = first.weight.clone()
    task = Task(
        model=model,
        loss=lambda output, batch: cross_entropy(output, batch),
        train={"x": x, "y": y},
        valid={"x": x, "y": y},
        samples=lambda trained: [{"sum": f"{trained(x).sum():.3f}"}],
    )
    result = package.train(task, strategy=strategy, workers=2, epochs=20, quiet=True)
    assert result.status == "done"
    assert result.samples == 20 * 101
    shown = json.loads((result.folder / "evaluation.json").read_text())["samples"]
    assert shown == [{"sum": f"{model.eval()(x).sum():.3f}"}]
    assert result.model is model
    assert not torch.equal(first.weight, before)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
