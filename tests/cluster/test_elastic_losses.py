"""Members and coordinators are lost during a run, and its result is the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from tests.cluster.elastic import FORWARD, RUN, STEPS, difference, proved, running
from tests.e2e.command import shelf, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_member_costs_neither_a_sample_nor_the_result(
    tmp_path: Path, weights: dict[str, Tensor], victim: int
) -> None:
    with running(tmp_path, workers=3) as run:
        run.reach(10)
        os.kill(run.pid(victim), signal.SIGKILL)
        run.go()
        output, errors = run.end(0)
    assert f"{STEPS} steps" in output
    assert "Traceback" not in errors
    (loss,) = run.said("lost", member=victim)
    assert loss["how"] == "killed"
    (recovery,) = run.said("recovered")
    assert recovery["lost_steps"] == 0
    assert difference(tmp_path, weights) < 1e-5
    assert f"member {victim} lost" in "\n".join(proved(tmp_path))


def test_a_killed_coordinator_is_replaced_and_missed_by_nobody(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, workers=2) as run:
        run.reach(10)
        os.kill(run.said("coordinator")[0]["pid"], signal.SIGKILL)
        run.wait("coordinator", again=True)
        run.go()
        _, errors = run.end(0)
    assert "the coordinator ended (signal 9); another one takes over" in errors
    told = [line for line in errors.splitlines() if "slower than the others" not in line]
    assert len(told) == 1, errors
    assert len(run.said("generation")) == 1, "the members went on as they were"
    assert {entry["how"] for entry in run.said("lost")} == {"left"}, "when they were done"
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_a_coordinator_that_is_killed_again_and_again_is_replaced(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    with running(tmp_path, workers=2) as run:
        run.reach(10)
        for killed in range(7):
            wait_for(lambda: len(run.said("coordinator")) > killed, run.command)  # noqa: B023
            if killed < 6:
                os.kill(run.said("coordinator")[-1]["pid"], signal.SIGKILL)
        run.go()
        run.end(0)
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_a_part_that_is_lost_with_its_only_holder_is_made_again(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    divided = ("strategy=sharded", "sharded.level=optimizer")
    with running(tmp_path, *divided, workers=2) as run:
        run.reach(5)
        os.kill(run.pid(0), signal.SIGKILL)
        run.go()
        run.end(0)
    (back,) = run.said("rolled_back")
    assert back["version"] == 0, "there is a checkpoint of the beginning"
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


# Workers wait in their model factory for the file `build`: no update, no checkpoint is made.
BEFORE_THE_FIRST_UPDATE = """
import os
import time
from pathlib import Path

import torch

COMMAND = os.getpid()

class Waiting(torch.nn.Sequential):
    def __init__(self, *layers):
        while os.getpid() != COMMAND and not Path("build").exists():
            time.sleep(0.005)
        super().__init__(*layers)

torch.nn.Sequential = Waiting
"""


@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_a_loss_before_the_first_update_leaves_the_initial_weights_of_the_seed(
    tmp_path: Path, weights: dict[str, Tensor], level: str
) -> None:
    divided = ("strategy=sharded", f"sharded.level={level}")
    waiting = BEFORE_THE_FIRST_UPDATE + FORWARD
    with running(tmp_path, *divided, workers=3, forward=waiting) as run:
        run.wait("generation", number=1)
        os.kill(run.pid(1), signal.SIGKILL)
        (tmp_path / "build").touch()
        run.go()
        run.end(0)
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_a_second_loss_after_one_before_the_first_update_goes_back_to_the_beginning(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    divided = ("strategy=sharded", "sharded.level=optimizer")
    waiting = BEFORE_THE_FIRST_UPDATE + FORWARD
    with running(tmp_path, *divided, workers=4, forward=waiting) as run:
        run.wait("generation", number=1)
        os.kill(run.pid(1), signal.SIGKILL)
        (tmp_path / "build").touch()
        run.reach(5)
        os.kill(run.pid(2), signal.SIGKILL)
        run.go()
        run.end(0)
    assert [entry["version"] for entry in run.said("rolled_back")] == [0]
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


def test_whoever_waits_inside_torch_is_called_off_too(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    """Member 3 meets only those who miss member 0, in connections that are torch's own."""
    with running(tmp_path, "strategy=sharded", "mesh={data: 2, sharded: 2}", workers=4) as run:
        run.reach(5)
        os.kill(run.pid(0), signal.SIGKILL)
        run.go()
        run.end(0)
    assert [entry["members"] for entry in run.said("generation")] == [[0, 1, 2, 3], [1, 2, 3]]
    assert not run.said("rolled_back"), "every part had another holder"
    assert difference(tmp_path, weights) < 1e-5
    proved(tmp_path)


# All wait in their 40th pass for the file `raises`; whose number it has raises there.
RAISES = """
import os
import time
from pathlib import Path

CALLS = 0

def forward(model, batch):
    global CALLS
    CALLS += 1
    while CALLS == 40 and not Path("raises").exists():
        time.sleep(0.005)
    if CALLS == 40 and int(Path("raises").read_text()) == os.getpid():
        raise ValueError("no more")
    return model(batch["x"])
"""


@pytest.mark.parametrize("member", [0, 1])
def test_an_error_leaves_the_last_update_behind_whoever_raised_it(
    tmp_path: Path, member: int
) -> None:
    with running(tmp_path, workers=2, forward=RAISES) as run:
        run.wait("joined", member=member)
        (tmp_path / "pid").write_text(str(run.pid(member)))
        (tmp_path / "pid").rename(tmp_path / "raises")
        _, errors = run.end(1)
    assert "ValueError: no more" in errors
    assert shelf(tmp_path, RUN).versions() == [39]
    (finished,) = run.said("finished")
    assert (finished["status"], finished["version"]) == ("failed", 39)
    proved(tmp_path)
