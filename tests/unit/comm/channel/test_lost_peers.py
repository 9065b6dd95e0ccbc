"""A peer that dies, freezes or vanishes is noticed in time; one that is only busy is not lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from echelon.comm.channel import Connection, connect, endpoint
from echelon.comm.channel import connection as life
from echelon.core.errors import PeerError

from .children import answers, echo, hold_the_interpreter, listening
from .pairs import KEY, address, pair

pytestmark = pytest.mark.timeout(60)

SOON = 8.0
"""Seconds on a busy machine; who does not notice waits much longer."""
LONG = 2.5
"""Seconds that are longer than any silence is borne."""


def call(where: object, **more: object) -> Connection:
    return connect(where, KEY, role="trainer 1", deadline=5.0, **more)  # type: ignore[arg-type]


def lost(connection: Connection, why: str) -> float:
    """After how many seconds a waiting receiver is told that its peer is lost."""
    since = time.monotonic()
    with pytest.raises(PeerError, match=why):
        connection.receive(SOON)
    return time.monotonic() - since


def until(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    since = time.monotonic()
    while not condition() and time.monotonic() - since < SOON:
        time.sleep(0.02)
    return condition()


@contextmanager
def peers(
    monkeypatch: pytest.MonkeyPatch,
    body: object = echo,
    *,
    patience: float = 1.5,
    borne: float = 1.5,
) -> Iterator[tuple[dict[str, Connection], dict[str, int]]]:
    """One over TCP, one over a unix socket, and one that seems to be of another host.

    `patience` is what this process has with that one, `borne` is theirs with this process.
    """
    with ExitStack() as stack:
        found: dict[str, Connection] = {}
        pids: dict[str, int] = {}
        for kind in ("tcp", "unix", "other host"):
            where, pids[kind] = stack.enter_context(
                listening(address(kind), body, borne)  # type: ignore[arg-type]
            )
            with monkeypatch.context() as patch:
                if kind == "other host":
                    patch.setattr(endpoint, "this_host", lambda: "elsewhere")
                found[kind] = call(where, patience=patience)
            stack.callback(found[kind].close)
        yield found, pids


def test_a_killed_peer_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(monkeypatch) as (connections, pids):
        for kind, connection in connections.items():
            assert answers(connection)
            os.kill(pids[kind], signal.SIGKILL)
            assert lost(connection, "server 0 at .* closed the connection or ended") < SOON
            with pytest.raises(PeerError, match="closed the connection or ended"):
                connection.send(1)


def test_a_stopped_peer_is_known_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(monkeypatch) as (connections, pids), ThreadPoolExecutor(3) as pool:
        for connection in connections.values():
            assert answers(connection)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        waits = [pool.submit(lost, peer, "is frozen") for peer in connections.values()]
        assert all(0.5 < wait.result() < SOON for wait in waits)


def test_a_stopped_peer_ends_a_send_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(monkeypatch) as (connections, pids):
        os.kill(pids["tcp"], signal.SIGSTOP)
        with pytest.raises(PeerError, match="is frozen: process"):
            connections["tcp"].send(1, b"", [torch.zeros(10_000_000)])


def test_a_peer_in_one_long_call_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(connection: Connection) -> None:
        hold_the_interpreter(LONG)
        echo(connection)

    with peers(monkeypatch, busy, patience=10.0) as (connections, _):
        for connection in connections.values():
            assert answers(connection)


def test_ones_own_long_call_makes_nobody_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(monkeypatch, borne=10.0) as (connections, _):
        hold_the_interpreter(LONG)
        for connection in connections.values():
            assert answers(connection)


def test_a_peer_that_reads_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what it is sent fills all buffers, and nothing more is taken for long."""

    def late(connection: Connection) -> None:
        connection.limit = 1 << 30
        time.sleep(LONG)
        assert connection.receive(5.0) is not None
        connection.take_bytes()
        connection.send(2)

    with peers(monkeypatch, late) as (connections, _):
        for connection in connections.values():
            connection.send(1, b"", [torch.zeros(4_000_000)])
            assert connection.receive(5.0) is not None


def test_who_ends_in_the_middle_of_a_message_leaves_no_one_waiting() -> None:
    with pair("tcp") as (ours, theirs), ThreadPoolExecutor(1) as pool:
        theirs.limit = 1 << 30
        sending = pool.submit(ours.send, 1, b"", [torch.zeros(10_000_000)])
        assert theirs.receive(5.0) is not None
        theirs.close()
        with pytest.raises(PeerError, match="closed the connection or ended"):
            sending.result(SOON)


@pytest.mark.parametrize("kind", ["tcp", "sealed"])
def test_pings_do_not_pile_up_where_nobody_receives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "PING_SECONDS", 0.0)
    with pair(kind) as (ours, theirs):
        ours.send(1, b"", [b"body"])
        assert theirs.receive(5.0) is not None
        # A body that is not taken yet is in the way of taking pings away.
        assert until(lambda: life.unread(theirs._socket) > 0)
        assert theirs.take_bytes() == b"body"
        monkeypatch.setattr(life, "PING_SECONDS", 60.0)
        assert until(lambda: life.unread(theirs._socket) == 0)
        ours.send(2)
        frame = theirs.receive(5.0)
        assert frame is not None
        assert frame.kind == 2


def test_an_end_is_known_even_if_nobody_receives() -> None:
    with pair("tcp") as (ours, theirs):
        theirs.close()
        assert until(lambda: ours._fate.why is not None)
        with pytest.raises(PeerError, match="closed the connection or ended"):
            ours.send(1)


def test_closing_ends_the_wait_of_another_thread() -> None:
    with pair("tcp") as (ours, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.receive)
        time.sleep(0.1)
        ours.close()
        with pytest.raises(PeerError, match="was left by this process"):
            waiting.result(SOON)


def test_a_forked_child_does_not_keep_a_connection_open() -> None:
    with pair("tcp") as (ours, theirs):
        pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
        try:
            ours.send(1)
            assert theirs.receive(SOON) is not None
            ours.close()
            assert lost(theirs, "closed the connection or ended") < SOON
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


_FAR = """
import subprocess, sys, time
from tests.unit.comm.channel.children import echo
from tests.unit.comm.channel.pairs import KEY
from echelon.comm.channel import Listener
listener = Listener(("0.0.0.0", 7777), KEY, role="server 0")
print("ready", flush=True)
while (connection := listener.accept(1.0)) is None:
    pass
echo(connection)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None,
    reason="a network of its own needs root",
)
def test_a_host_that_vanishes_is_known_soon() -> None:
    root = Path(__file__).parents[4]
    far = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", _FAR],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert far.stdout is not None
        assert far.stdout.readline() == "ready\n"
        here, there = f"ech{far.pid}a"[-15:], f"ech{far.pid}b"[-15:]
        inside = ("nsenter", "--target", str(far.pid), "--net")
        _do("ip", "link", "add", here, "type", "veth", "peer", there, "netns", str(far.pid))
        _do("ip", "addr", "add", "198.18.77.1/30", "dev", here)
        _do("ip", "link", "set", here, "up")
        _do(*inside, "ip", "addr", "add", "198.18.77.2/30", "dev", there)
        _do(*inside, "ip", "link", "set", there, "up")
        connection = call(("198.18.77.2", 7777))
        try:
            assert connection.sealed
            assert answers(connection)
            _do(*inside, "ip", "link", "set", there, "down")
            assert lost(connection, "is out of reach: nothing is acknowledged") < SOON
        finally:
            connection.close()
            _do("ip", "link", "delete", here)
    finally:
        far.kill()
        far.communicate()


def looks(
    monkeypatch: pytest.MonkeyPatch, seen: Callable[[float], life.Signs], *, step: float = 0.25
) -> float | None:
    """After how many seconds somebody is given up, by what the kernel says at each of them."""
    now = 0.0
    monkeypatch.setattr(life, "monotonic", lambda: 1000.0 + now)
    monkeypatch.setattr(life, "signs", lambda _: seen(now))
    with pair("tcp") as (ours, _):
        watch = life.Life(ours._socket, None, patience=60.0)
        while now < SOON:
            if watch.look()[0] is not None:
                return now
            now += step
    return None


def test_who_does_not_answer_is_lost_before_the_kernel_sends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one slow round trip the kernel waits for seconds before it does."""
    last = looks(monkeypatch, lambda now: life.Signs(0, int(now >= 0.5), now % 0.5, now, now))
    assert last is not None
    assert 1.5 < last < 2.0


def test_silence_alone_makes_nobody_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with nothing under way, nor with something sent a moment ago."""
    assert looks(monkeypatch, lambda now: life.Signs(0, 0, now, now, now)) is None
    asked = looks(
        monkeypatch, lambda now: life.Signs(0, int(now % 1 < 0.5), now % 1, now + 2, now + 2)
    )
    assert asked is None


def test_who_answers_while_more_is_sent_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, lambda _: life.Signs(0, 9, 0.0, 1.6, 0.1)) is None


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10)
