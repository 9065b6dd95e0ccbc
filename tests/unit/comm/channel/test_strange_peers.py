"""A peer that does not belong here is refused with one clear line; other peers notice nothing."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.channel import Connection, Listener, connect, endpoint, handshake, stream
from echelon.comm.channel.handshake import Card, Refused
from echelon.comm.channel.sockets import Address, open_socket
from echelon.core.errors import PeerError

from .mutants import Peer, exactly, greet, mutated, serve
from .pairs import KEY, address, pair

pytestmark = pytest.mark.timeout(60)


@contextmanager
def door(kind: str = "tcp") -> Iterator[tuple[Listener, list[str]]]:
    said: list[str] = []
    opened = Listener(address(kind), KEY, role="server 0", refused=said.append)
    try:
        yield opened, said
    finally:
        opened.close()


def lets_in(opened: Listener) -> bool:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, opened.address, KEY, role="trainer 1", deadline=5.0)
        theirs = opened.accept(5.0)
        ours = calling.result(5)
    ours.close()
    if theirs is not None:
        theirs.close()
    return theirs is not None


def turned_out(opened: Listener, said: list[str], within: float = 5.0) -> str:
    until = time.monotonic() + within
    while not said and time.monotonic() < until:
        assert opened.accept(0.05) is None
    [line] = said
    return line


def test_a_wrong_key_is_refused_at_both_ends() -> None:
    with door() as (opened, said), ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, opened.address, bytes(32), role="trainer 1", deadline=5.0)
        assert "was refused: wrong key: this is another run's" in turned_out(opened, said)
        with pytest.raises(PeerError, match="it says: wrong key: this is another run's"):
            calling.result(5)
        assert lets_in(opened)


def test_another_version_is_refused() -> None:
    with door() as (opened, said), raw(opened.address) as caller:
        opened.accept(0.1)
        heard = exactly(caller, handshake.CHALLENGE)
        call = bytearray(handshake.call(KEY, bytes(32), False, Card("trainer 1", 1, ""), heard))
        call[4:6] = struct.pack("<H", 9)
        caller.sendall(call)
        assert "protocol version 9 and 1 do not fit" in turned_out(opened, said)
        assert b"protocol version 9 and 1 do not fit" in caller.recv(1000)
        assert lets_in(opened)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 4, bytes(500), b"\xff" * 80])
def test_garbage_is_refused(noise: bytes) -> None:
    with door() as (opened, said), raw(opened.address) as caller:
        caller.sendall(noise)
        assert "is not Echelon's handshake" in turned_out(opened, said)
        assert lets_in(opened)


def test_one_that_hangs_up_is_no_trouble() -> None:
    with door() as (opened, said):
        with raw(opened.address):
            opened.accept(0.05)
        assert "it hung up" in turned_out(opened, said)
        assert lets_in(opened)


def test_a_slow_one_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "GREETING", 0.3)
    with door() as (opened, said), raw(opened.address) as caller:
        caller.sendall(b"E")
        assert lets_in(opened)
        assert "no handshake within 0.3 s" in turned_out(opened, said)


def test_a_crowd_at_the_door_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CROWD", 2)
    with door() as (opened, said), raw(opened.address), raw(opened.address), raw(opened.address):
        assert "too many others knock" in turned_out(opened, said)
        assert lets_in(opened)


def test_a_proof_of_another_handshake_is_of_no_use() -> None:
    with door() as (opened, said), raw(opened.address) as first, raw(opened.address) as second:
        opened.accept(0.1)
        heard = exactly(first, handshake.CHALLENGE)
        call = handshake.call(KEY, bytes(32), False, Card("trainer 1", 1, ""), heard)
        second.sendall(call)
        assert "wrong key" in turned_out(opened, said)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (handshake.refusal("nobody is let in"), "it says: nobody is let in"),
        (b"HTTP/1.1 200 OK" + bytes(200), "no Echelon is listening there"),
        (handshake.answer(bytes(32), Card("server 0", 1, ""), b""), "another run is listening"),
    ],
)
def test_a_caller_does_not_talk_to_strangers(answer: bytes, why: str) -> None:
    def strange(held: socket.socket) -> None:
        opened, _ = held.accept()
        with opened:
            opened.sendall(handshake.challenge(bytes(32), False))
            opened.recv(1000)
            opened.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as held, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(strange, held)
        with pytest.raises(PeerError, match=why):
            connect(held.getsockname()[:2], KEY, role="trainer 1", deadline=5.0)
        serving.result(5)


def test_a_challenge_of_another_version_is_named() -> None:
    strange = bytearray(handshake.challenge(bytes(32), False))
    strange[4] = 7
    with pytest.raises(Refused, match="protocol version 7 and 1 do not fit"):
        handshake.read_challenge(bytes(strange))
    strange[4:8] = struct.pack("<HH", 1, 6)
    with pytest.raises(Refused, match="flags 0x6 are not known"):
        handshake.read_challenge(bytes(strange))


@pytest.mark.parametrize(
    "card", [b"", b"[]", b"{}", b'["a","b","c"]', b'["a\\u0007",1,"c"]', b"[" * 500]
)
def test_a_card_that_says_nothing_is_refused(card: bytes) -> None:
    with pytest.raises(Refused, match="its card is not"):
        Card.read(card)


def test_a_card_has_a_size() -> None:
    with pytest.raises(ValueError, match="512 at most"):
        Card("trainer" * 100, 1, "").pack()
    long = handshake.call(KEY, bytes(32), False, Card("x", 1, ""), b"")[: handshake.CALL]
    with pytest.raises(Refused, match="a card of 60000 bytes is over the limit"):
        handshake.call_length(long[:-2] + struct.pack("<H", 60_000))


def test_nobody_there_is_said_in_time() -> None:
    with pytest.raises(PeerError, match=r"nobody at unix socket echelon-nobody within 0.1 s"):
        connect("echelon-nobody", KEY, role="trainer 1", deadline=0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(
            PeerError, match=r"within 0.3 s: somebody listens there, and does not answer"
        ),
    ):
        connect(silent.getsockname()[:2], KEY, role="trainer 1", deadline=0.3)
    with pytest.raises(PeerError, match="the run is over"):
        connect(
            "echelon-nobody", KEY, role="trainer 1", deadline=60, halted=lambda: "the run is over"
        )


def test_two_cannot_listen_at_one_place() -> None:
    with door() as (opened, _), pytest.raises(PeerError, match=r"nothing can listen at 127.0.0.1:"):
        Listener(opened.address, KEY, role="server 0")


@pytest.mark.parametrize("kind", ["tcp", "sealed"])
@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_no_mutant_gets_in(kind: str, seed: int) -> None:
    """Random frames from somebody who has the key, wrong in random ways."""
    sealed = kind == "sealed"
    with door("unix") as (opened, _), ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_served, opened)
        caller, keys = greet(opened.address, KEY, seal=sealed)
        with caller:
            with suppress(OSError):  # it has seen enough before all was sent
                caller.sendall(mutated(keys, sealed, random.Random(seed)))
                caller.shutdown(socket.SHUT_WR)
            assert serving.result(10), "the mutant was let in"


def _served(opened: Listener) -> str:
    theirs = opened.accept(5.0)
    assert isinstance(theirs, Connection)
    try:
        serve(theirs)
    except PeerError as error:
        return str(error)
    finally:
        theirs.close()
    return ""


@contextmanager
def raw(where: Address) -> Iterator[socket.socket]:
    opened = open_socket(where, 5.0)
    try:
        yield opened
    finally:
        opened.close()


def test_one_that_takes_nothing_though_it_lives_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair("tcp") as (ours, _):
        monkeypatch.setattr(stream, "STALL", 0.4)  # the sockets have been given the usual one
        with pytest.raises(PeerError, match=r"took nothing of what was sent for 0.4 s"):
            ours.send(1, b"", [bytes(100_000_000)])


@pytest.mark.parametrize("sent", [40, 60], ids=["head", "body"])
def test_one_that_stops_in_mid_frame_though_it_lives_is_given_up(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL", 0.4)
    with door() as (opened, _), ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(opened.accept, 5.0)
        caller, keys = greet(opened.address, KEY)
        theirs = accepting.result(5)
        assert theirs is not None
        wire = Peer(keys, False, random.Random(0)).made(1, 0, b"h" * 10, b"b" * 100).wire
        caller.sendall(wire[:sent])
        with caller, pytest.raises(PeerError, match=r"in the middle of a message for 0.4 s"):
            _whole(theirs)
        theirs.close()


def _whole(theirs: Connection) -> None:
    assert theirs.receive(5.0) is not None
    theirs.take_bytes()


def test_memory_is_not_shared_between_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    with door("unix") as (opened, said), ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(endpoint, "this_host", lambda: "another container")
        calling = pool.submit(connect, opened.address, KEY, role="trainer 1", deadline=5.0)
        assert "two containers talk over TCP" in turned_out(opened, said)
        with pytest.raises(PeerError, match="two containers talk over TCP"):
            calling.result(5)


def test_descriptors_that_nobody_asked_for_are_bounded() -> None:
    with pair("unix") as (ours, theirs):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))]
        for _ in range(5):
            ours._send(1, 0, b"", [], rights)
        with pytest.raises(PeerError, match="sent more descriptors than were asked for"):
            [theirs.receive(5.0) for _ in range(5)]
