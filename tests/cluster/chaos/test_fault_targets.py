"""Which processes faults hit, and which they spare."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from echelon.checkpoint.store import CHECKPOINTS
from echelon.cluster.chaos.faults import Actuators, Never, NotYet
from echelon.cluster.chaos.plan import read_plan
from echelon.cluster.chaos.view import Command, Scene
from echelon.cluster.services import SERVERS


def test_a_server_is_killed_only_while_its_state_is_somewhere_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as server:
        server_of = {"shard": 0, "pid": server.pid}
        seats = [server_of | {"twin": False}, server_of | {"twin": True, "pid": 0}]
        (tmp_path / SERVERS).write_text(json.dumps(seats[:1]))
        formed = {"kind": "generation", "time": 1.0, "number": 1, "members": [0], "version": 0}
        (tmp_path / "journal.jsonl").write_text(json.dumps(formed | {"shares": None}) + "\n")
        (scene := Scene(tmp_path / "journal.jsonl")).update()
        nobody = cast(Command, None)  # asked by other faults alone
        actuators = Actuators(scene, tmp_path, nobody, 0, None)
        (fault,) = read_plan("kill server@step=1")
        with pytest.raises(NotYet, match="the state of server 0 is nowhere else"):
            actuators.do(fault)
        (tmp_path / SERVERS).write_text(json.dumps(seats))
        assert actuators.do(fault).who == "server 0"
        assert server.wait(10.0) == -signal.SIGKILL
        with pytest.raises(NotYet, match="nowhere else"):
            actuators.do(fault)  # the next twin may not have all of it yet
        (tmp_path / CHECKPOINTS / "step-000000000010").mkdir(parents=True)
        with pytest.raises(NotYet, match="server 0 has just ended"):
            actuators.do(fault)


@pytest.mark.parametrize(
    ("shards", "words"),
    [([], "the run has no servers"), ([1, 2], r"there is no server 0 \(choices: 1, 2\)")],
)
def test_a_server_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, shards: list[int], words: str
) -> None:
    seats = [{"shard": shard, "pid": 0, "twin": False} for shard in shards]
    (tmp_path / SERVERS).write_text(json.dumps(seats))
    formed = {"kind": "generation", "time": 1.0, "number": 1, "members": [0], "version": 0}
    (tmp_path / "journal.jsonl").write_text(json.dumps(formed | {"shares": None}) + "\n")
    (scene := Scene(tmp_path / "journal.jsonl")).update()
    (fault,) = read_plan("kill server:0@step=1")
    with pytest.raises(Never, match=words):
        Actuators(scene, tmp_path, cast(Command, None), 0, None).do(fault)
