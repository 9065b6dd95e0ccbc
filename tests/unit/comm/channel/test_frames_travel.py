"""Frames arrive as they were sent, over every kind of connection."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from echelon.comm.channel import Connection, Listener, Segment, connect
from echelon.comm.channel.frames import PING, SEGMENT
from echelon.comm.channel.sockets import abstract
from echelon.core.errors import PeerError

from .pairs import KEY, KINDS, pair

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", KINDS)
def test_head_body_and_number_arrive(kind: str) -> None:
    body = [torch.arange(1000.0), torch.tensor([True, False]), torch.zeros(0)]
    with pair(kind) as (ours, theirs):
        ours.send(7, {"step": 3}, body, seq=12)
        frame = theirs.receive(5.0)
        assert frame is not None
        assert (frame.kind, frame.seq, frame.size) == (7, 12, 4002)
        assert frame.fields() == {"step": 3}
        found = [torch.empty_like(part) for part in body]
        theirs.take(found)
        assert all(map(torch.equal, found, body))


@pytest.mark.parametrize("kind", KINDS)
def test_large_bodies_of_any_type_arrive_in_both_directions(kind: str) -> None:
    body = [torch.randn(700_001), torch.randn(900_000).bfloat16(), torch.arange(5)]
    size = sum(part.nbytes for part in body)
    with pair(kind) as (ours, theirs), ThreadPoolExecutor(2) as pool:
        ours.limit = theirs.limit = size
        for source, sink in ((ours, theirs), (theirs, ours)):
            sent = pool.submit(source.send, 1, b"", body)
            seen: list[int] = []
            found = [torch.empty_like(part) for part in body]
            assert sink.receive(10.0) is not None
            sink.take(found, seen.append)
            sent.result(10)
            assert all(map(torch.equal, found, body))
            assert seen == sorted(seen)
            assert seen[-1] == size


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_nobody_takes_is_skipped(kind: str) -> None:
    with pair(kind) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        theirs.limit = 1 << 30
        sent = pool.submit(ours.send, 1, b"", [torch.ones(600_000), torch.ones(10)])
        first = theirs.receive(5.0)
        sent_too = pool.submit(ours.send, 2, b"", [torch.ones(10)])
        second = theirs.receive(5.0)
        assert first is not None
        assert second is not None
        assert (first.kind, second.kind) == (1, 2)
        assert theirs.take_bytes() == bytes(torch.ones(10).numpy())
        sent.result(5)
        sent_too.result(5)


def test_nothing_in_time_is_none() -> None:
    with pair("tcp") as (_, theirs):
        assert theirs.receive(0.0) is None
        assert theirs.receive(0.3) is None


def test_memory_is_shared() -> None:
    with pair("unix") as (ours, theirs):
        segment = Segment.create(10_000)
        ours.send(1)
        ours.send_segment(segment)
        ours.send(2)
        assert theirs.receive(5.0) is not None
        found = theirs.receive_segment(10_000)
        last = theirs.receive(5.0)
        assert last is not None
        assert last.kind == 2
        found.close()
        segment.close()
        segment.tensor[9_999] = 77
        assert found.tensor[9_999] == 77


def test_memory_of_another_size_is_refused() -> None:
    with pair("unix") as (ours, theirs):
        segment = Segment.create(4096)
        ours.send_segment(segment)
        with pytest.raises(PeerError, match="has 4,096 bytes, not 8,192"):
            theirs.receive_segment(8192)
        segment.close()


def test_the_head_may_be_bytes() -> None:
    with pair("tcp") as (ours, theirs):
        ours.send(1, json.dumps([1]).encode())
        frame = theirs.receive(5.0)
        assert frame is not None
        assert frame.head == b"[1]"
        with pytest.raises(PeerError, match="not a JSON object"):
            frame.fields()


def test_a_body_over_the_limit_is_refused_before_it_comes() -> None:
    with pair("tcp") as (ours, theirs):
        theirs.limit = 100
        ours.send(1, b"", [bytes(101)])
        with pytest.raises(PeerError, match="a body of 101 bytes is over the limit of 100"):
            theirs.receive(5.0)
        assert_closed(ours)


def assert_closed(connection: Connection) -> None:
    with pytest.raises(PeerError, match="closed the connection or ended"):
        connection.receive(5.0)


def test_a_name_is_tried_at_all_its_addresses() -> None:
    listener = Listener(("127.0.0.1", 0), KEY, role="server 0")
    assert not isinstance(listener.address, str)
    port = listener.address[1]
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, ("localhost", port), KEY, role="trainer 1", deadline=5.0)
        theirs = listener.accept(5.0)
        ours = calling.result(5)
    assert theirs is not None
    assert theirs.card.role == "trainer 1"
    for end in (ours, theirs, listener):
        end.close()


@pytest.mark.parametrize("body", [b"", b"body"])
def test_kinds_of_its_own_are_not_for_the_user(body: bytes) -> None:
    with pair("unix") as (ours, theirs):
        with pytest.raises(ValueError, match="241 is no kind of frame: 0 to 239"):
            ours.send(241)
        ours.send(SEGMENT, bytes(8), [body])
        with pytest.raises(PeerError, match="sent a frame of kind 254 where another was due"):
            theirs.receive(5.0)


def test_a_ping_has_no_body() -> None:
    with pair("tcp") as (ours, theirs):
        ours.send(PING, b"", [b"body"])
        with pytest.raises(PeerError, match="sent a frame of kind 255 where another was due"):
            theirs.receive(5.0)


def test_memory_that_never_comes_is_said_to_be_missing() -> None:
    with pair("unix") as (ours, theirs):
        with pytest.raises(PeerError, match=r"shared no memory within 0.1 s"):
            theirs.receive_segment(4096, timeout=0.1)
        del ours
    with pair("unix") as (ours, theirs):
        ours.send(SEGMENT, bytes(8))
        with pytest.raises(PeerError, match="shared memory without a descriptor"):
            theirs.receive_segment(4096)
    with pair("tcp") as (ours, _), pytest.raises(ValueError, match="not a unix socket"):
        ours.receive_segment(4096)


def test_what_is_taken_has_the_size_of_what_came() -> None:
    with pair("tcp") as (ours, theirs):
        ours.send(1, b"", [bytes(10)])
        assert theirs.receive(5.0) is not None
        with pytest.raises(PeerError, match="sent 10 bytes where 12 were due"):
            theirs.take([torch.zeros(3)])


def test_only_plain_memory_goes_over_the_wire() -> None:
    with pair("tcp") as (ours, _):
        with pytest.raises(ValueError, match="only contiguous tensors"):
            ours.send(1, b"", [torch.zeros(4, 4).T])
        with pytest.raises(ValueError, match="a head of 65,537 bytes is over the limit"):
            ours.send(1, bytes(65_537))
        with pytest.raises(ValueError, match="Out of range float values"):
            ours.send(1, {"loss": float("nan")})
        ours.send(1)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 108])
def test_a_socket_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a unix socket"):
        abstract(name)
