"""Peers that know the key and send invalid messages: they are disconnected, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.comm.channel import Connection, connect
from echelon.comm.ps import messages
from echelon.comm.ps.client import Servers
from echelon.comm.ps.messages import Chunk, Kind, PushHead, pack_chunk, pack_push
from echelon.core.errors import PeerError
from echelon.core.types import Lease
from tests.unit.server.fleet import Fleet, fleet
from tests.unit.server.small_job import Job

PUSH = PushHead(1, Lease(0, 0, 4), 0, (4.0, 4.0, 1.0, 0.0, 0.1))
Saying = Callable[[Connection, Job], None]


def set_up(connection: Connection, job: Job) -> None:
    document = {"layout": job.layout.to_json(), "rules": job.rules}
    connection.send(Kind.SET_UP, {"member": 7}, [messages.to_bytes(document)], seq=1)
    answer = connection.receive(5.0)
    assert answer is not None
    assert answer.kind == Kind.ANSWER


def chunk_outside(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    head = pack_chunk(Chunk(0, 3000, 9000))
    connection.send(Kind.GRADIENTS, head, [torch.zeros(6000)])


def range_outside(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    connection.send(Kind.GRADIENTS, pack_chunk(Chunk(9, 0, 1)), [torch.zeros(1)])


def other_size(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    head = pack_push(PUSH._replace(chunks=(Chunk(0, 0, 16),)))
    connection.send(Kind.PUSH, head, [torch.zeros(17)], seq=3)


def torn_head(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    connection.send(Kind.PUSH, pack_push(PUSH)[:-3], seq=3)


def twice_set_up(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    connection.send(Kind.SET_UP, {"member": 7}, [b"{}"])


def no_layout(connection: Connection, _: Job) -> None:
    connection.send(Kind.SET_UP, {"member": 1}, [b'{"layout": 3}'])


def bad_upload(connection: Connection, job: Job) -> None:
    set_up(connection, job)
    connection.send(Kind.UPLOAD, {}, [messages.to_bytes({"part": {}, "incarnation": -1})])


SAYINGS: dict[str, Saying] = {
    "no kind": lambda c, _: c.send(199),
    "push first": lambda c, _: c.send(Kind.PUSH, pack_push(PUSH), seq=1),
    "pull first": lambda c, _: c.send(Kind.PULL, seq=1),
    "no member": lambda c, _: c.send(Kind.SET_UP, {}, [b"{}"]),
    "no document": lambda c, _: c.send(Kind.SET_UP, {"member": 1}, [b"not JSON"]),
    "state first": lambda c, _: c.send(Kind.STATE, {}, [torch.zeros(4)]),
    "no question": lambda c, _: c.send(Kind.CALL, {"name": "everything"}),
    "no generation": lambda c, _: c.send(Kind.ENTER, {"generation": "one"}),
    "memory over TCP": lambda c, _: c.send(Kind.ROOM, {"shared": True}),
    "of a gate": lambda c, _: c.send(Kind.ENTRY, {"number": 1}),
    "chunk outside": chunk_outside,
    "range outside": range_outside,
    "other size": other_size,
    "torn head": torn_head,
    "set up twice": twice_set_up,
    "bad upload": bad_upload,
}


def _heard_out(connection: Connection) -> None:
    """All that is said; returns if nothing more is."""
    while connection.receive(5.0) is not None:
        continue


def hung_up_on(held: Fleet, role: str, saying: Saying, job: Job) -> None:
    address = held.addresses[0]
    connection = connect((address.host, address.port), held.key, role=role, deadline=5.0)
    try:
        saying(connection, job)
        with pytest.raises(PeerError, match="closed the connection"):
            _heard_out(connection)
    finally:
        connection.close()


def test_whoever_makes_no_sense_is_hung_up_on_and_the_run_goes_on() -> None:
    with fleet() as held:
        servers = held.trainer(0, "tcp")
        try:
            job = Job(servers, 0)
            hung_up_on(held, "trainer 7", no_layout, job)
            job.begin(1, [0])
            for step, saying in enumerate(SAYINGS.values()):
                hung_up_on(held, "trainer 7", saying, job)
                assert job.step(step).version == step + 1
            hung_up_on(held, "passer-by", lambda *_: None, job)
            hung_up_on(held, "shard 1", lambda c, _: c.send(Kind.HELLO, {"shard": 5}), job)
            hung_up_on(held, "shard 1", lambda c, _: c.send(Kind.STAGED, {"member": 0}), job)
            hung_up_on(held, "twin 0", lambda c, _: c.send(Kind.ACK, {"number": "x"}), job)
            assert job.step(99).kind == "applied"
        finally:
            servers.close()


def test_answers_of_a_shard_that_make_no_sense_lose_it() -> None:
    """The other way round: heads as a trainer unpacks them."""
    from echelon.comm.ps.messages import Outcome, unpack_chunk, unpack_push

    for unpack in (unpack_chunk, unpack_push, Outcome.unpack):
        with pytest.raises(PeerError):
            unpack(b"short")
    good = Outcome("late", 3, 1, (1.0,), 0, 0.5, "too old", weights=True)
    assert Outcome.unpack(good.pack()) == good
    with pytest.raises(PeerError, match="makes no sense"):
        Outcome.unpack(b"\xff" + good.pack()[1:])


@pytest.mark.parametrize("senseless", [{"missing": [1_000_000]}, {"square": -1.0}])
def test_a_push_whose_numbers_make_no_sense_is_void(senseless: dict[str, Any]) -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, clip={"norm": 1.0})
        job.begin(1, [0])
        return [job.step(0, **senseless).kind, job.step(1).kind]

    with fleet(1) as held:
        assert held.run(1, body) == [["void", "applied"]]
