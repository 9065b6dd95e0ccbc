"""Between hosts no attacker can read, change or repeat frames."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.cluster.coordinator import session as calls
from echelon.cluster.coordinator.protocol import (
    LIMIT,
    BadFrame,
    Decoder,
    Seal,
    answer_to,
    answered,
    challenge_fields,
    encode,
)
from echelon.cluster.coordinator.session import Call, Refused
from tests.cluster.coordinator.real import Coordinator, Trainer

pytestmark = pytest.mark.timeout(120)

KEY, OURS, THEIRS = bytes(range(32)), b"c" * 32, b"m" * 32

Meddle = Callable[[bytes], bytes]


def pair() -> tuple[Seal, Seal]:
    """The coordinator's end and the member's."""
    return Seal(KEY, OURS, THEIRS, calling=False), Seal(KEY, OURS, THEIRS, calling=True)


def read(seal: Seal, data: bytes) -> list[dict[str, object]]:
    decoder = Decoder()
    decoder.opened = seal.opened
    return list(decoder.feed(data))


def test_a_frame_is_read_by_the_other_end_alone() -> None:
    here, there = pair()
    data = here.closed([encode("welcome", secret="leases")])
    assert b"leases" not in data
    assert read(there, data) == [{"kind": "welcome", "secret": "leases"}]
    assert read(here, there.closed([encode("beat")])) == [{"kind": "beat"}]


@pytest.mark.parametrize("at", [4, 12, -1])
def test_a_frame_that_was_changed_is_refused(at: int) -> None:
    here, there = pair()
    data = bytearray(here.closed([encode("end", why="all done")]))
    data[at] ^= 1
    with pytest.raises(BadFrame, match="changed on its way"):
        read(there, bytes(data))


def test_a_frame_that_is_repeated_left_out_or_sent_back_is_refused() -> None:
    here, there = pair()
    first, second = here.closed([encode("a")]), here.closed([encode("b")])
    assert read(there, first) == [{"kind": "a"}]
    with pytest.raises(BadFrame):
        read(there, first)
    here, there = pair()
    here.closed([encode("a")])
    with pytest.raises(BadFrame):
        read(there, here.closed([encode("b")]))
    with pytest.raises(BadFrame):
        read(here, second)
    with pytest.raises(BadFrame, match="too short"):
        read(there, b"\0\0\0\x02ab")


def test_the_largest_frame_fits_when_it_is_encrypted() -> None:
    here, there = pair()
    text = "x" * (LIMIT - len(encode("a", text="")) + 4)
    decoder = Decoder(LIMIT + 16)
    decoder.opened = there.opened
    (found,) = decoder.feed(here.closed([encode("a", text=text)]))
    assert found["text"] == text
    with pytest.raises(BadFrame, match="over the limit"):
        encode("a", text=text + "x")


def test_nobody_in_between_can_talk_them_out_of_it() -> None:
    challenge = {"kind": "challenge", **challenge_fields(OURS, sealed=True)}
    fields, _, seal = answer_to(KEY, THEIRS, False, challenge)
    assert seal is not None
    assert answered(KEY, OURS, True, {"kind": "proof", **fields})[1] is not None
    with pytest.raises(BadFrame, match="wrong key"):
        answered(KEY, OURS, True, {"kind": "proof", **fields, "sealed": False})
    # The challenge was changed, and the member believes it.
    fields, _, seal = answer_to(KEY, THEIRS, False, {**challenge, "sealed": False})
    assert seal is None
    with pytest.raises(BadFrame, match="between hosts everything is encrypted"):
        answered(KEY, OURS, True, {"kind": "proof", **fields})


def hang_up(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was quicker
        return


class Wiretap:
    """A relay between members and coordinator: it keeps what goes by, and may meddle with it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.heard = bytearray()
        self.meddle: Meddle = bytes
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        for one in self._open:
            hang_up(one)  # closing alone would not wake who reads from it
        for thread in self._threads:
            thread.join(10)
        for one in [self._listener, *self._open]:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, sink)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(self.meddle(data))
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one of the ends is closed
            return


@contextmanager
def tapped(folder: Path) -> Iterator[tuple[Coordinator, Wiretap]]:
    with Coordinator(folder) as coordinator:
        tap = Wiretap(coordinator.address)
        coordinator.address = tap.address
        try:
            yield coordinator, tap
        finally:
            tap.close()


def test_what_leaves_the_host_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "stays_here", lambda _: False)
    with tapped(tmp_path) as (coordinator, tap), Trainer(coordinator, 0) as trainer:
        assert trainer.liaison.arrive(0, [0], "start").number == 1
        assert trainer.liaison.run == {"job": "digits"}
    assert tap.heard.count(b'"kind"') == 3, "challenge and proofs"
    assert b"digits" not in tap.heard


def test_what_stays_on_the_host_is_not_encrypted(tmp_path: Path) -> None:
    with tapped(tmp_path) as (coordinator, tap), Trainer(coordinator, 0) as trainer:
        assert trainer.liaison.arrive(0, [0], "start").number == 1
    assert b"digits" in tap.heard


def test_after_a_changed_byte_the_member_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "stays_here", lambda _: False)

    def once(data: bytes) -> bytes:
        tap.meddle = bytes
        return data[:-1] + bytes([data[-1] ^ 1])

    with tapped(tmp_path) as (coordinator, tap), Trainer(coordinator, 0) as trainer:
        assert trainer.liaison.arrive(0, [0], "start").number == 1
        handshakes = tap.heard.count(b"challenge")
        tap.meddle = once
        until = time.monotonic() + 30
        while tap.heard.count(b"challenge") == handshakes and time.monotonic() < until:
            time.sleep(0.02)
        assert tap.heard.count(b"challenge") > handshakes
        assert trainer.liaison.arrive(1, [0], "again").number == 2
        assert coordinator.written("lost") == []


def test_a_wrong_key_is_refused_before_anything_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "stays_here", lambda _: False)
    with Coordinator(tmp_path) as coordinator, pytest.raises(Refused, match="wrong key"):
        Call(coordinator.address, bytes(32))
