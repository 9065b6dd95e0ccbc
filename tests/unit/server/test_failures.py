"""Trainers and servers that are lost, frozen or late."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from echelon.comm.channel import Connection
from echelon.comm.ps.client import Servers
from echelon.comm.ps.link import LostShard
from echelon.core.errors import PeerError
from echelon.server.seats import PinnedSeat
from echelon.server.weights import Done
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import SHAPES, Alone, Job, close

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


@pytest.mark.parametrize("shapes", [SHAPES, LARGE])
@pytest.mark.parametrize("plane", ["memory", "tcp"])
def test_after_the_first_shard_was_lost_all_weights_that_come_are_the_new_ones(
    plane: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """It lent the others its memory: they have that of its successor, and so has who trains."""
    with fleet(2) as held:
        servers = held.trainer(0, plane)
        try:
            job = Job(servers, 0, shapes=shapes)
            job.begin(1, [0])
            job.step(7)  # is lost
            held.kill(0)
            held.start(0)
            job.begin(2, [0])
            assert close(job.weights(), Alone(shapes=shapes).weights())
            assert [job.step(step).version for step in range(2)] == [1, 2]
            found = job.weights()
        finally:
            servers.close()
    alone = Alone(shapes=shapes)
    for step in range(2):
        alone.step([(step, 0)])
    assert close(found, alone.weights())


def test_a_trainer_with_weights_of_its_own_follows_a_shard_into_other_memory() -> None:
    ours, theirs = torch.zeros(4), torch.zeros(4)
    nobody = cast(Connection, None)  # nothing is said
    seat = PinnedSeat(nobody, [torch.zeros(4)], [theirs], [ours])
    seat.moved([torch.full((4,), 2.0)])
    seat.done(Done(0, 1, 3))
    assert theirs.tolist() == [0, 2, 2, 0]
    seat.whole()
    assert theirs.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("plane", ["memory", "tcp"])
def test_a_wait_is_called_off_or_ends_by_itself(plane: str) -> None:
    """Of two members only one is there."""
    with fleet(2) as held:
        called_off = time.monotonic() + 1.0
        servers = Servers(
            held.addresses,
            held.key,
            0,
            plane=plane,
            halted=lambda: "member 1 is lost" if time.monotonic() > called_off else None,
        )
        hasty = Servers(held.addresses, held.key, 1, plane=plane, deadline=0.5)
        try:
            job, late = Job(servers, 0), Job(hasty, 1)
            job.begin(1, [0, 1])
            job.fill(0)
            job.push(0)
            with pytest.raises(
                PeerError, match=r"member 1 is lost; the outcome of push .* awaited"
            ):
                servers.outcome()
            late.begin(2, [0, 1])
            late.fill(0)
            late.push(0)
            with pytest.raises(
                PeerError, match=r"did not answer within 0\.5 s; the outcome of push"
            ):
                hasty.outcome()
        finally:
            servers.close()
            hasty.close()


@pytest.mark.timeout(60)
def test_a_frozen_trainer_is_out_and_comes_back_to_a_closed_door() -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member)
        job.begin(1, [0, 1])
        job.step(0)
        if member == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            job.fill(1)
            try:
                job.push(1)
                servers.outcome()
            except PeerError:
                return "closed"
        time.sleep(3.0)  # the servers notice within 2 s
        servers.enter(2, [0])
        job.version = servers.pull()
        found = job.step(1).kind
        Path("done").touch()
        return found

    with fleet() as held:
        pids: list[int] = []

        def besides() -> None:
            while not Path("done").exists():
                time.sleep(0.01)
            os.kill(pids[1], signal.SIGCONT)

        found = held.run(2, body, besides=besides, started=pids.append)
    assert found == ["applied", "closed"]


def test_servers_that_could_not_be_reached_cannot_be_asked() -> None:
    """A set-up was broken off, and what is on record is asked for before the next one."""
    with fleet(1) as held:
        servers = held.trainer(0)
        job = Job(servers, 0)
        job.begin(1, [0])
        servers._terms.halted = lambda: "somebody is lost"
        held.kill(0)
        with pytest.raises(PeerError):
            servers.set_up(job.layout, job.rules)
        with pytest.raises(PeerError, match="not connected"):
            servers.records(0)
        servers.close()


def test_a_trainer_that_was_given_up_finds_that_others_went_on_without_it() -> None:
    """It is no fault of the run: it may come back as another member."""
    with fleet(1) as held:
        servers = held.trainer(1)
        try:
            job = Job(servers, 1)
            job.begin(1, [1])
            servers.enter(2, [0, 1])
            for again in (lambda: servers.enter(1, [1]), lambda: servers._again(0)):
                with pytest.raises(PeerError, match="generation 1 is over: this is generation 2"):
                    again()
        finally:
            servers.close()
