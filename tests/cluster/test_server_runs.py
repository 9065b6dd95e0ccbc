"""Whole runs with a parameter server: trainers and servers are killed, and trainers join."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch import Tensor

from echelon.cluster.services import served
from tests.cluster.elastic import (
    ENDLESS,
    EPOCHS,
    FORWARD,
    JOB,
    RUN,
    STEPS,
    Running,
    difference,
    join,
    prepare,
    proved,
    running,
)
from tests.cluster.shared import is_alive
from tests.e2e.command import DEADLINE, echelon, start, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]

SERVED = "strategy=parameter_server"
MODES = {
    "asynchronous": ["parameter_server.staleness=none"],
    "bounded": ["parameter_server.staleness=1"],
    "backup": ["parameter_server.quorum=2"],
}


def server(run: Running, shard: int) -> int:
    """The process that serves it now."""
    found = [s["pid"] for s in served(run.run) if s["shard"] == shard and not s["twin"]]
    return int(found[0])


def test_trainers_that_come_and_go_cost_neither_a_sample_nor_the_result(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, SERVED, "parameter_server.servers=2", workers=2) as run:
        run.reach(10)
        servers = [server(run, shard) for shard in (0, 1)]
        with join(tmp_path, str(run.run)) as newcomer:
            run.wait("joined", member=2)
            os.kill(run.pid(0), signal.SIGKILL)
            run.go()
            output, errors = run.end(0)
            newcomer.communicate(timeout=DEADLINE)
    assert f"{STEPS} steps" in output
    assert "Traceback" not in errors
    assert run.said("lost", member=0)[0]["how"] == "killed"
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)
    assert not any(map(is_alive, servers))
    assert served(run.run) == []


@pytest.mark.parametrize("mode", MODES)
def test_trainers_apart_consume_every_sample_once_whoever_comes_and_goes(
    tmp_path: Path, mode: str
) -> None:
    with running(tmp_path, SERVED, *MODES[mode], *ENDLESS, workers=3) as run:
        run.go()
        run.reach(10)
        os.kill(run.pid(0), signal.SIGKILL)
        generation = run.wait("generation", number=2)
        run.reach(generation["version"] + 20)
        with join(tmp_path, str(run.run)) as newcomer:
            generation = run.wait("generation", number=3)
            assert generation["members"] == [1, 2, 3]
            run.reach(generation["version"] + 20)
            _, errors = run.stop()
            newcomer.communicate(timeout=DEADLINE)
    assert "Traceback" not in errors
    assert any(" 3: " in line for line in proved(tmp_path))


# Whoever comes first makes no update, for want of finite ones, before another one is lost.
LATE = """
import os

LATE = None

def forward(model, batch, others=forward):
    global LATE
    if LATE is None:
        try:
            Path("late").touch(exist_ok=False)
            LATE = True
        except FileExistsError:
            LATE = False
    if LATE and not Path("lost").exists():
        return others(model, batch) * float("nan")
    if not LATE and CALLS == 2:
        Path(f"ahead-{os.getpid()}").touch()
    return others(model, batch)
"""


def test_trainers_apart_that_know_of_different_versions_do_the_same_after_a_loss(
    tmp_path: Path,
) -> None:
    settings = [*MODES["asynchronous"], *ENDLESS, "batch_size=5", "health.non_finite=skip"]
    with running(tmp_path, SERVED, *settings, workers=3, forward=FORWARD + LATE) as run:
        run.go()
        wait_for(lambda: len(list(tmp_path.glob("ahead-*"))) == 2, run.command)
        ahead, _ = tmp_path.glob("ahead-*")
        os.kill(int(ahead.name.removeprefix("ahead-")), signal.SIGKILL)
        generation = run.wait("generation", number=2)
        (tmp_path / "lost").touch()
        run.reach(generation["version"] + 20)
        _, errors = run.stop()
    assert "Traceback" not in errors
    assert [entry["number"] for entry in run.said("generation")] == [1, 2]
    proved(tmp_path)


# What is fetched for a cut takes longer than others' next updates.
FETCHED = """
from echelon.strategy.parameter_server.connection import Connected

def fetched(self, fetch=Connected._optimizer_state):
    if self._comm.index == 0:
        time.sleep(0.1)
        with open("cuts", "a") as file:
            print(self.version, self._here.state()["version"], file=file)
    return fetch(self)

Connected._optimizer_state = fetched
"""


def test_a_cut_of_trainers_apart_is_of_one_version(tmp_path: Path) -> None:
    settings = [*MODES["asynchronous"], "parameter_server.servers=2", "checkpoint.every=10"]
    with running(tmp_path, SERVED, *settings, workers=3, forward=FORWARD + FETCHED) as run:
        run.go()
        run.end(0)
    cuts = [line.split() for line in (tmp_path / "cuts").read_text().splitlines()]
    assert len(cuts) > 5
    assert all(weights == optimizer for weights, optimizer in cuts), cuts
    proved(tmp_path)


def test_a_server_that_stands_still_is_replaced_by_its_twin(tmp_path: Path) -> None:
    with running(tmp_path, SERVED, "parameter_server.replicas=1", *ENDLESS, workers=2) as run:
        run.go()
        run.reach(5)
        frozen = server(run, 0)
        os.kill(frozen, signal.SIGSTOP)
        wait_for(lambda: server(run, 0) != frozen, run.command)
        before = max(entry["last"] for entry in run.said("committed"))
        run.reach(before + 50)
        _, errors = run.stop()
    assert "server 0 stood still for 1.25 s: it is ended" in errors
    assert "its twin takes over" in errors
    assert not run.said("rolled_back")
    proved(tmp_path)


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("mode", ["together", "apart"])
def test_a_lost_server_takes_the_run_back_to_its_checkpoint(
    tmp_path: Path, weights: dict[str, Tensor], mode: str, shard: int
) -> None:
    settings = []
    if mode == "apart":  # they make twice the steps before one of them waits for `go`
        settings = [*MODES["asynchronous"], f"epochs={2 * EPOCHS}", "elastic.balance=false"]
    servers = ["parameter_server.servers=2", "checkpoint.every=20"]
    with running(tmp_path, SERVED, *servers, *settings, workers=2) as run:
        run.reach(30)
        os.kill(server(run, shard), signal.SIGKILL)
        run.go()
        output, errors = run.end(0)
    assert f"{2 * STEPS if mode == 'apart' else STEPS} steps" in output
    assert f"server {shard} ended (signal 9); another one takes its place" in errors
    assert "Traceback" not in errors
    (found,) = re.findall(r"went back from step (\d+) to the checkpoint of step (\d+)", errors)
    before, after = map(int, found)
    assert 20 <= after <= before
    backs = [back["version"] for back in run.said("rolled_back")]
    # Apart, what the gate has applied is on record a little later: there may be nothing to undo.
    assert backs == [after] * (after < before) or (mode == "apart" and not backs)
    assert mode == "apart" or difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


SAVING = """
from torch import nn

class Sequential(nn.Sequential):
    def state_dict(self, *args, **kwargs):
        Path("saving").touch()
        while not Path("lost").exists():
            time.sleep(0.005)
        return super().state_dict(*args, **kwargs)

nn.Sequential = Sequential
"""


def test_a_server_lost_before_the_first_checkpoint_is_done_without(tmp_path: Path) -> None:
    with running(tmp_path, SERVED, workers=2, forward=FORWARD + SAVING) as run:
        wait_for(lambda: (tmp_path / "saving").exists(), run.command)
        os.kill(server(run, 0), signal.SIGKILL)
        (tmp_path / "lost").touch()
        run.go()
        output, errors = run.end(0)
    assert f"{STEPS} steps" in output
    assert "Traceback" not in errors
    proved(tmp_path)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_twin_takes_over_and_nothing_is_lost(
    tmp_path: Path, weights: dict[str, Tensor], shard: int
) -> None:
    twins = ["parameter_server.servers=2", "parameter_server.replicas=1"]
    with running(tmp_path, SERVED, *twins, workers=2) as run:
        run.reach(20)
        os.kill(server(run, shard), signal.SIGKILL)
        run.go()
        output, errors = run.end(0)
    assert f"{STEPS} steps" in output
    assert f"server {shard} ended (signal 9); its twin takes over" in errors
    assert not run.said("rolled_back")
    assert len(run.said("generation")) == 1, "trainers need not even meet"
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_a_stopped_run_goes_on_in_one_process(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with running(tmp_path, SERVED, *MODES["asynchronous"], workers=2) as run:
        run.reach(10)
        os.kill(run.command.pid, signal.SIGINT)
        run.go()
        run.end(130)
    again = echelon("train", "--resume", RUN, "strategy=single", "workers=1", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert difference(tmp_path, weights) < 1.0
    proved(tmp_path)


def test_no_server_outlives_whoever_started_it(tmp_path: Path) -> None:
    prepare(tmp_path)
    words = ("train", *JOB, SERVED, "workers=1", "parameter_server.replicas=1", "-q")
    with start(*words, folder=tmp_path) as command:
        run = Running(command, tmp_path)
        run.reach(5)
        pids = [seat["pid"] for seat in served(run.run)]
        os.kill(command.pid, signal.SIGKILL)
        command.communicate(timeout=DEADLINE)
    assert len(pids) == 2
    deadline = time.monotonic() + DEADLINE
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a server is left"
        time.sleep(0.01)
