"""Malformed and hostile bytes on the wire are refused, on either side of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.cluster.coordinator.protocol import LIMIT, Decoder, Message, encode, member_proof
from echelon.cluster.coordinator.session import Call, Refused
from echelon.core.errors import PeerError
from tests.cluster.coordinator.real import Coordinator, Trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path) as started:
        yield started
        with Trainer(started, 0) as trainer:  # whatever happened, it goes on
            assert trainer.liaison.arrive(0, [0], "start").number == 1


def answer_to(coordinator: Coordinator, data: bytes, *, proven: bool = False) -> list[Message]:
    """All that the coordinator says until it hangs up."""
    if proven:
        call = Call(coordinator.address, coordinator.key)
        connection = call.socket
    else:
        connection = socket.create_connection(coordinator.address)
    with connection:
        connection.settimeout(30)
        connection.sendall(data)
        decoder, found = Decoder(), []
        while chunk := connection.recv(1 << 16):
            found += list(decoder.feed(chunk))
    return found


def hello(**more: Any) -> bytes:
    who = {"pid": 4711, "host": "x", "name": "x", "generation": 0, "version": 2}
    return encode("hello", **{"role": "trainer", **who, **more})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a frame of 1,195,725,856 bytes is over the limit"),
        (b"\0\0\0\x04\xff\xfe\xfd\xfc", "a frame is not JSON"),
        (b"\0\0\0\x02[]", "not a JSON object with a kind"),
        (b"\0\0\x03\x00" + b"[" * 768, "a frame is not JSON"),
        (encode("beat", step=1), "'beat' where 'proof' was due"),
        (encode("proof", version=1), "protocol version 1 and 2 do not fit"),
        (encode("proof", version=2, nonce="abc"), "a nonce has 32 bytes"),
        (encode("proof", version=2, nonce="00" * 32, proof="é" * 64), "wrong key"),
        (encode("proof", version=2, nonce="00" * 32, proof=None), "wrong key"),
        (encode("proof", version=2, nonce="00" * 500), "over the limit of 1,024"),
    ],
)
def test_whoever_does_not_know_the_key_gets_a_reason_and_nothing_else(
    coordinator: Coordinator, data: bytes, why: str
) -> None:
    challenge, refused = answer_to(coordinator, data)
    assert challenge["kind"] == "challenge"
    assert refused["kind"] == "refused"
    assert why in refused["why"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encode("beat", step=1, doing=""), "a hello of protocol version 2 was due"),
        (hello(version=9), "a hello of protocol version 2 was due"),
        (hello(role="king"), "says role = 'king': it must be 'trainer' or 'supervisor'"),
        (hello(pid=0), "says pid = 0: it must be a whole number of at least 1"),
        (hello(name="a\x1b[2J"), "printable"),
        (hello(host="h" * 300), "at most 255 characters"),
        (hello() + encode("beat", step=True, doing=""), "says step = True"),
        (hello() + encode("gone", pid=1, status=0), "is for supervisors to send"),
        (hello() + hello(), "a frame 'hello' is not for trainers to send at this point"),
        (hello() + encode("sing"), "a frame of the unknown kind 'sing'"),
        (hello() + (LIMIT + 1).to_bytes(4, "big"), "over the limit of 1,048,576"),
        (hello(role="supervisor") + encode("beat", step=1, doing=""), "is not for supervisors"),
    ],
)
def test_a_frame_that_is_not_as_agreed_ends_its_connection_with_a_reason(
    coordinator: Coordinator, data: bytes, why: str
) -> None:
    assert why in answer_to(coordinator, data, proven=True)[-1]["why"]


def test_whoever_is_too_slow_is_let_go_and_may_try_again(coordinator: Coordinator) -> None:
    began = time.monotonic()
    refused = answer_to(coordinator, b"\0\0")[-1]
    assert refused["why"] == "no hello within 2 s"
    assert refused["again"] is True
    assert time.monotonic() - began > 1.9


def test_a_wrong_key_is_told_to_the_one_who_has_it_and_logged_once(
    coordinator: Coordinator,
) -> None:
    for _ in range(3):
        with pytest.raises(Refused, match="wrong key: this is another run's join string"):
            Trainer(coordinator, key=bytes(32))
    assert coordinator.log.read_text().count("wrong key") == 1


def test_the_key_never_crosses_the_wire_and_old_answers_are_of_no_use(
    coordinator: Coordinator,
) -> None:
    with socket.create_connection(coordinator.address) as first:
        (challenge,) = Decoder().feed(first.recv(4096))
    nonce = bytes(32)
    proof = member_proof(coordinator.key, bytes.fromhex(challenge["nonce"]), nonce, False)
    replayed = encode("proof", version=2, nonce=nonce.hex(), proof=proof)
    assert coordinator.key.hex().encode() not in replayed
    assert answer_to(coordinator, replayed)[-1]["why"].startswith("wrong key")


def test_an_impostor_that_listens_instead_of_the_coordinator_is_found_out(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    seen: list[Message] = []

    def pretend() -> None:
        connection, _ = coordinator.listener.accept()
        with connection:
            connection.sendall(encode("challenge", version=2, nonce="00" * 32))
            seen.extend(Decoder().feed(connection.recv(4096)))
            # The member's own proof, sent back to it.
            connection.sendall(encode("proof", proof=seen[0]["proof"]))
            connection.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    try:
        with pytest.raises(PeerError, match="does not know this run's key"):
            Trainer(coordinator)
    finally:
        thread.join(30)
        coordinator.listener.close()


def test_noise_of_any_kind_leaves_the_coordinator_as_it_was(coordinator: Coordinator) -> None:
    for size in (1, 3, 5, 100, 5000):
        with socket.create_connection(coordinator.address) as connection:
            connection.sendall(os.urandom(size))
    with socket.create_connection(coordinator.address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_a_number_that_is_not_one_is_refused(coordinator: Coordinator) -> None:
    body = b'{"kind":"beat","step":1,"doing":"","pace":NaN}'
    data = hello() + len(body).to_bytes(4, "big") + body
    assert "NaN" in answer_to(coordinator, data, proven=True)[-1]["why"]
