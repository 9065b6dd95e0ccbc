"""Members join a live run: new ones, frozen ones that come back, other counts after a resume."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon import Task, cross_entropy, train
from echelon.track import Store
from tests.cluster import shared
from tests.cluster.elastic import (
    ENDLESS,
    EPOCHS,
    RUN,
    SAMPLES,
    difference,
    join,
    proved,
    running,
)
from tests.e2e.command import DEADLINE, echelon, last_json, start
from tests.e2e.forks import Command, forks

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]

NEVER = {"every": "never"}


def refused(command: Command) -> str:
    """A command that is to fail: what it says, in one line."""
    with command:
        output, errors = command.communicate(timeout=DEADLINE)
    assert command.returncode not in (0, None), output
    (line,) = errors.splitlines()
    return line


def counted_by(folder: Path, member: int) -> bool:
    """Whether the proof has samples that this member computed."""
    return any(f" {member}: " in line for line in proved(folder))


def test_a_newcomer_takes_part_and_a_stranger_does_not(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, workers=2) as run:
        run.go()
        run.reach(5)
        (text,) = (run.run / "join").read_text().splitlines()
        assert (run.run / "join").stat().st_mode & 0o777 == 0o600
        stranger, _, key = text.rpartition("/")
        said = refused(join(tmp_path, f"{stranger}/{'0' * len(key)}"))
        assert said.startswith("error: ")
        assert "key" in said
        with join(tmp_path, text) as newcomer:
            generation = run.wait("generation", number=2)
            assert generation["members"] == [0, 1, 2]
            run.reach(generation["version"] + 20)
            run.stop()
            output, errors = newcomer.communicate(timeout=DEADLINE)
    assert newcomer.returncode == 0, errors
    assert "stopped" in output
    assert counted_by(tmp_path, 2)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server"])
def test_a_newcomer_that_is_stopped_leaves_and_the_run_goes_on(
    tmp_path: Path, strategy: str, sent: signal.Signals
) -> None:
    with running(tmp_path, *ENDLESS, f"strategy={strategy}", workers=2) as run:
        run.go()
        run.reach(5)
        with join(tmp_path) as newcomer:
            joined = run.wait("generation", members=[0, 1, 2])
            run.reach(joined["version"] + 20)
            os.kill(newcomer.pid, sent)
            output, errors = newcomer.communicate(timeout=DEADLINE)
        assert (newcomer.returncode, errors) == (130, "")
        assert output == f"stopped by {sent.name}; the run goes on\n"
        left = run.wait("generation", number=joined["number"] + 1)
        assert left["members"] == [0, 1]
        assert run.said("lost", member=2)[0]["why"] == f"stopped by {sent.name}"
        run.reach(left["version"] + 20)
        output, _ = run.stop()
    assert output.count("stopped by SIGINT") == 1
    assert counted_by(tmp_path, 2)


def test_too_few_members_wait_for_one_that_joins(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, "elastic.min_workers=2", workers=2) as run:
        run.reach(5)
        os.kill(run.pid(0), signal.SIGKILL)
        run.go()
        run.wait("lost", member=0)
        with join(tmp_path) as newcomer:
            _, errors = run.end(0)
            newcomer.communicate(timeout=DEADLINE)
    assert newcomer.returncode == 0
    assert "1 of at least 2 members are left: waiting for more to join" in errors
    assert [entry["members"] for entry in run.said("generation")] == [[0, 1], [1, 2]]
    assert difference(tmp_path, weights) < 1e-5
    assert counted_by(tmp_path, 2)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_member_is_given_up_and_may_come_back(tmp_path: Path, frozen: int) -> None:
    with running(tmp_path, *ENDLESS, workers=3) as run:
        run.go()
        run.reach(5)
        pid, others = run.pid(frozen), [member for member in range(3) if member != frozen]
        os.kill(pid, signal.SIGSTOP)
        assert run.wait("lost", member=frozen)["how"] == "frozen"
        without = run.wait("generation", number=2)
        assert without["members"] == others
        run.reach(without["version"] + 5)
        os.kill(pid, signal.SIGCONT)
        back = run.wait("generation", members=[*others, 3])
        assert run.pid(3) == pid
        run.reach(back["version"] + 60)
        output, errors = run.stop()
    assert "Traceback" not in errors
    assert output.count("stopped by SIGINT") == 1
    assert counted_by(tmp_path, 3)


def test_four_go_on_with_what_two_began(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with running(tmp_path, "steps=50", workers=2) as run:
        run.end(0)
    words = ("train", "--resume", RUN, "steps=null", "workers=4", "--json", "-q")
    (tmp_path / "go").touch()
    found = last_json(echelon(*words, folder=tmp_path))
    assert found["samples"] == EPOCHS * SAMPLES
    assert difference(tmp_path, weights) < 1e-5
    assert counted_by(tmp_path, 3)


def be_python(folder: str) -> None:
    """A run that was started from Python, in a process of its own."""
    os.chdir(folder)
    x = torch.randn(60, 4)
    task = Task(
        model=torch.nn.Linear(4, 2),
        loss=cross_entropy,
        train={"x": x, "y": (x.sum(1) > 0).long()},
        name="script",
    )
    train(task, strategy="all_reduce", workers=2, epochs=10**6, quiet=True, checkpoint=NEVER)


def test_a_run_that_was_started_from_python_cannot_be_joined(tmp_path: Path) -> None:
    script = forks().Process(target=be_python, args=(str(tmp_path),))
    script.start()
    try:
        invitation = tmp_path / "runs" / "script-0001" / "join"
        shared.wait_for(lambda: invitation.exists() and invitation.read_text().endswith("\n"))
        said = refused(join(tmp_path, str(invitation.parent)))
    finally:
        assert script.pid is not None
        os.kill(script.pid, signal.SIGKILL)
        script.join()
    assert "was started from Python" in said


def test_what_is_no_invitation_is_refused_in_one_line(tmp_path: Path) -> None:
    said = refused(join(tmp_path, "nowhere"))
    assert "'nowhere' is neither a join string (echelon://HOST:PORT/KEY) nor the folder" in said
    said = refused(join(tmp_path, "echelon://127.0.0.1:1/abc"))
    assert "echelon://HOST:PORT/KEY" in said


def test_a_run_that_is_over_is_said_to_be(tmp_path: Path) -> None:
    """Nobody can listen any more, and so nobody is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    said = refused(join(tmp_path, f"echelon://127.0.0.1:{port}/{'0' * 64}"))
    assert said == f"error: the run has ended: nobody listens at 127.0.0.1:{port}"


def test_a_run_that_is_under_way_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, workers=2) as run:
        run.go()
        run.reach(5)
        said = refused(start("train", "--resume", RUN, "-q", folder=tmp_path))
        assert f"run '{RUN}' is still running" in said
        assert len(run.said("begun")) == 1
        assert Store(tmp_path / "runs").run(RUN).status == "running"
        run.stop()
