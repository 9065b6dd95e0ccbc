"""Whole runs with a parameter server, whose trainers and servers are killed and joined."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from echelon.cluster.fleet import served
from tests.cluster.elastic import ENDLESS, STEPS, Running, difference, join, proved, running
from tests.cluster.shared import is_alive
from tests.e2e.command import DEADLINE

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
