"""A shard, a gate and a twin after a loss, without the processes around them."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echelon.comm.channel import Connection, Listener
from echelon.comm.ps import messages
from echelon.comm.ps.client import Plan, Servers
from echelon.comm.ps.messages import Kind, PushHead, ShardAddress
from echelon.core.types import Lease
from echelon.server.decisions import Entry, Staged
from echelon.server.dispatch import Desk
from echelon.server.replication import Twin
from echelon.server.seats import Seat
from echelon.server.shard import ServerSettings, Shard
from tests.unit.server.small_job import Job

KEY = secrets.token_bytes(32)
NAME = f"echelon-test-{secrets.token_hex(6)}"
ADDRESS = ShardAddress(0, "127.0.0.1", 1, NAME)


class Chair(Seat):
    """Of a trainer that is not there."""

    def __init__(self) -> None:
        self.lost = False

    def hang_up(self) -> None:
        self.lost = True


def plan() -> Plan:
    job = Job(Servers([ADDRESS], KEY, 0), 0, replicas=1)
    return Plan.of(job.layout, 1, job.rules)


def made(shards: int = 1) -> Shard:
    """One with weights."""
    shard = Shard(0, shards)
    shard.set_up(json.loads(plan().document), lambda _: None)
    shard.load(shard.holding.flats.part(), 7, 3)
    return shard


def test_a_push_that_never_comes_takes_the_run_back_to_a_cut() -> None:
    """Its entry was decided before the shard was lost, and its trainer was lost as well."""
    shard, chair = made(), Chair()
    shard.sit(1, chair)
    shard.add(Entry(1, 4, (Staged(0, 5),)))
    shard.order.work()
    assert (shard.incarnation, shard.version, chair.lost) == (7, 3, False), "it may come yet"
    shard.add(Entry(2, 4, anew=True))
    shard.order.work()
    assert (shard.incarnation, chair.lost) == (0, True)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_other_shards_have_of_a_push_is_known_when_it_is_sent_again(breaks: bool) -> None:
    """Another shard greets the gate that took over before the trainer does; or its connection to
    the gate alone breaks."""
    desk = Desk(made(2), ServerSettings(0, (ADDRESS, ADDRESS), KEY))
    desk.prepare({"quorum": 1, "staleness": 0, "samples": 100}, 5)
    desk.enter(1, [0])
    head = PushHead(1, Lease(0, 0, 4), 0, (4.0, 4.0, 1.0, 0.0, 0.1))
    desk.arrived(0, "one")
    desk.staged(1, 0, 7)
    if breaks:
        desk.left(0, "one")
    desk.arrived(0, "another")
    assert desk.gate.version == 0
    desk.push(0, 7, head)
    assert desk.gate.version == 1


@contextmanager
def followed(shard: Shard) -> Iterator[Connection]:
    """What a shard has of its twin, after its hello."""
    over = threading.Event()
    twin = Twin(ServerSettings(0, (ADDRESS,), KEY, twin=True), shard, over.is_set)
    listener = Listener(NAME, KEY, role="server 0")
    thread = threading.Thread(target=twin.run)
    thread.start()
    try:
        connection = listener.accept(10.0)
        assert connection is not None
        frame = connection.receive(10.0)
        assert frame is not None
        assert frame.kind == Kind.HELLO
        yield connection
        connection.close()
    finally:
        listener.close()
        over.set()
        thread.join()


def test_a_twin_that_lost_its_shard_half_way_has_nothing() -> None:
    shard = made()
    with followed(shard) as connection:
        assert shard.incarnation == 0, "the shard may have gone on without it"
        part = shard.holding.flats.part()
        document = {
            "set_up": json.loads(plan().document),
            "part": part.head(),
            "incarnation": 8,
            "version": 9,
            "number": 2,
        }
        connection.send(Kind.MIRROR, {}, [messages.to_bytes(document)])
        connection.send(Kind.STATE, {}, part.body())
        deadline = time.monotonic() + 10.0
        while shard.version != 9 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert (shard.incarnation, shard.version) == (0, 9), "the rows of its tables are missing"
