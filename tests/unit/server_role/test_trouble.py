"""Trainers and servers that are lost, strange or late."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.unit.server_role.fleet import fleet
from tests.unit.server_role.model import Alone, Job, close

from echelon.comm.servers.link import LostShard
from echelon.comm.servers.servers import Servers

LARGE = ((1500, 1500), (1500,))


@pytest.mark.parametrize("plane", ["memory", "tcp"])
def test_a_trainer_that_dies_in_mid_push_leaves_nothing_behind(plane: str, tmp_path: Path) -> None:
    """Two trainers make a step, one dies while it pushes, the other goes on alone."""

    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, shapes=LARGE)
        job.begin(1, [0, 1])
        assert job.step(0).kind == "applied"
        if member == 1:
            job.fill(1)
            servers._links[0].push = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            servers.ready(0)
            job.push(1)
        job.fill(1)
        job.push(1)
        (tmp_path / "pushed").touch()
        servers.enter(2, [0])
        job.version = servers.pull()
        assert job.step(2).version == 2
        return job.weights()

    with fleet(2) as held:
        found = held.run(2, body, plane=plane, may_die=[1])
    alone = Alone(shapes=LARGE)
    alone.step([(0, 0), (0, 1)])
    alone.step([(2, 0)])
    assert close(found[0], alone.weights())


@pytest.mark.parametrize("plane", ["memory", "tcp"])
def test_a_lost_shard_is_named_with_what_was_awaited(plane: str) -> None:
    with fleet(2) as held:
        pid = held.servers[1, False].pid
        servers = held.trainer(0, plane)
        try:
            job = Job(servers, 0)
            job.begin(1, [0, 1])
            job.fill(0)
            job.push(0)  # of two: the outcome does not come
            held.kill(1)
            words = rf"shard 1 \(pid {pid}\) is lost: server 1 at .* ended; the outcome of push"
            with pytest.raises(LostShard, match=words) as caught:
                servers.outcome()
            assert caught.value.shard == 1
            held.start(1)
            assert servers.set_up(job.layout, job.rules), "one shard of two is empty"
            job.upload()
            servers.enter(2, [0])
            job.version = servers.pull()
            assert job.step(0).version == 1
        finally:
            servers.close()
