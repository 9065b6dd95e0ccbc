"""What leaves this host is encrypted, and cannot be changed or sent again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from echelon.comm.channel import Connection, Listener, connect
from echelon.comm.channel.sockets import serve_socket
from echelon.comm.channel.stream import TAG, Cipher
from echelon.comm.peers import is_loopback
from echelon.core.errors import PeerError

from .mutants import exactly, greet
from .pairs import KEY, pair

pytestmark = pytest.mark.timeout(60)

SECRET = b"a gradient that nobody else may see" * 100


def outward() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        found = str(asking.getsockname()[0])
    return "" if is_loopback(found) else found


@contextmanager
def tapped(
    host: str, *, change: int | None = None, seal: bool | None = None
) -> Iterator[tuple[Connection, Connection, bytearray]]:
    """Two ends at this address, and all that the first says on the wire between them.

    `change`: which byte of that does not arrive as it was.
    """
    heard = bytearray()
    held = serve_socket((host, 0))
    listener = Listener((host, 0), KEY, role="server 0")
    assert not isinstance(listener.address, str)
    with ThreadPoolExecutor(4) as pool:
        onward = socket.socket()
        onward.connect(listener.address)
        calling = pool.submit(
            connect, held.getsockname(), KEY, role="trainer 1", deadline=5.0, seal=seal
        )
        inward, _ = held.accept()
        pool.submit(_pass_on, inward, onward, heard, change)
        pool.submit(_pass_on, onward, inward, bytearray())
        theirs = listener.accept(5.0)
        ours = calling.result(5)
        assert theirs is not None
        try:
            yield ours, theirs, heard
        finally:
            for end in (ours, theirs, listener, held):
                end.close()
    inward.close()
    onward.close()


def _pass_on(
    source: socket.socket, sink: socket.socket, heard: bytearray, change: int | None = None
) -> None:
    while part := bytearray(source.recv(65536)):
        if change is not None and 0 <= change - len(heard) < len(part):
            part[change - len(heard)] ^= 1
        heard += part
        sink.sendall(part)
    sink.shutdown(socket.SHUT_RDWR)


def sent(ours: Connection, theirs: Connection) -> None:
    ours.send(1, SECRET, [SECRET, torch.zeros(100_000)])
    theirs.limit = 1 << 20
    frame = theirs.receive(5.0)
    assert frame is not None
    assert frame.head == SECRET
    assert theirs.take_bytes() == SECRET + bytes(400_000)


@pytest.mark.skipif(not outward(), reason="this machine has no other address than loopback")
def test_what_leaves_this_host_is_encrypted() -> None:
    with tapped(outward()) as (ours, theirs, heard):
        assert ours.sealed
        assert theirs.sealed
        sent(ours, theirs)
        assert len(heard) > 400_000
        assert SECRET[:16] not in heard
        assert bytes(64) not in heard


def test_what_stays_here_is_not() -> None:
    with tapped("127.0.0.1") as (ours, theirs, heard):
        assert not ours.sealed
        sent(ours, theirs)
        assert SECRET in heard


def test_it_is_encrypted_if_either_end_asks_for_it() -> None:
    with pair("sealed") as (ours, theirs):
        assert ours.sealed
        assert theirs.sealed


@pytest.mark.parametrize("at", [250, 1_000, 200_000])
def test_a_changed_byte_of_head_or_body_is_refused(at: int) -> None:
    with (
        tapped("127.0.0.1", change=at, seal=True) as (ours, theirs, _),
        ThreadPoolExecutor(1) as pool,
    ):
        sending = pool.submit(sent, ours, theirs)
        with pytest.raises(PeerError, match="changed"):
            sending.result(5)


def test_no_nonce_comes_twice() -> None:
    cipher, text = Cipher(KEY), memoryview(bytes(32))
    found = set()
    for _ in range(100):
        sealed = bytearray(32 + TAG)
        cipher.seal(text, memoryview(sealed))
        found.add(bytes(sealed))
    assert len(found) == 100


def test_records_open_in_order_alone_and_with_their_header() -> None:
    def records() -> list[bytearray]:
        cipher, made = Cipher(KEY), []
        for text in (b"one", b"two"):
            made.append(bytearray(3 + TAG))
            cipher.seal(memoryview(text), memoryview(made[-1]), b"header")
        return made

    first, second = records()
    into = memoryview(bytearray(3))
    Cipher(KEY).open(memoryview(first), into, b"header")
    assert bytes(into) == b"one"
    for record, header in ((second, b"header"), (first, b"hEader"), (first[::-1], b"header")):
        with pytest.raises(PeerError, match="what came was changed on its way"):
            Cipher(KEY).open(memoryview(record), into, header)


def test_the_two_directions_have_different_keys() -> None:
    listener = Listener(("127.0.0.1", 0), KEY, role="server 0", seal=True)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, 5.0)
        caller, keys = greet(listener.address, KEY, seal=True)
        theirs = accepting.result(5)
    listener.close()
    assert theirs is not None
    assert keys.send != keys.receive
    theirs.send(1)
    caller.sendall(exactly(caller, 36 + TAG))
    with pytest.raises(PeerError, match="a frame was changed, lost or doubled on its way"):
        theirs.receive(5.0)
    theirs.close()
    caller.close()
