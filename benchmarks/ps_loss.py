"""How soon a process knows that the one it talks to was killed, is frozen or has vanished.

A server in a process of its own answers; then it gets a SIGKILL or a SIGSTOP, or its network is
cut (it has one of its own for that, which needs root), while the caller waits for an answer or is
in the middle of sending 100 MB. Figures are the worst of all rounds, in seconds. The last line is
one JSON object; null stands for what could not be tried.

    python benchmarks/ps_loss.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from echelon.comm.channel import Address, Connection, Listener, connect
from echelon.comm.channel.sockets import address_of, serve_socket
from echelon.core.errors import PeerError

KEY = bytes(range(32))
NEW_NETWORK = 0x40000000
PORT = 7777
HERE, THERE = "198.18.78.1", "198.18.78.2"
DEADLINE = 30.0

Act = Callable[[int], None]
"""What happens to the server's process."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    near: dict[str, Address] = {"tcp": ("127.0.0.1", 0), "unix": f"echelon-loss-{os.getpid()}"}
    signals = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
    found: dict[str, float | None] = {}
    for name, number in signals.items():

        def act(pid: int, number: int = number) -> None:
            os.kill(pid, number)

        found[name] = max(
            tried(near[plane], act, sending, f"{name}, {plane}")
            for plane in near
            for sending in (False, True)
            for _ in range(rounds)
        )
    found["vanished"] = None
    if os.geteuid() == 0:
        far = [
            tried((THERE, PORT), cut, sending, "vanished")
            for sending in (False, True)
            for _ in range(rounds)
        ]
        found["vanished"] = max(far)
    print(json.dumps({f"{name}_s": value for name, value in found.items()}))


def tried(address: Address, act: Act, sending: bool, what: str) -> float:
    """Seconds from the act to the error."""
    with server(address) as (where, pid):
        connection = connect(where, KEY, role="trainer 0", deadline=DEADLINE)
        try:
            asked(connection)
            act(pid)
            spent = noticed(connection, sending)
        finally:
            connection.close()
    doing = "sending" if sending else "waiting"
    print(f"{what:>14}, while {doing}: {spent:.3f} s", flush=True)
    return round(spent, 3)


def asked(connection: Connection) -> None:
    connection.send(1)
    assert connection.receive(DEADLINE) is not None


def noticed(connection: Connection, sending: bool) -> float:
    since = time.monotonic()
    try:
        if sending:
            connection.send(1, b"", [torch.zeros(25_000_000)])
        connection.receive(DEADLINE)
    except PeerError:
        return time.monotonic() - since
    sys.exit(f"the loss was not noticed within {DEADLINE:g} s")


def cut(pid: int) -> None:
    _do(*_inside(pid), "ip", "link", "set", f"far{pid}", "down")


@contextmanager
def server(address: Address) -> Iterator[tuple[Address, int]]:
    """Where it listens, and its process."""
    far = address == (THERE, PORT)
    held = None if far else serve_socket(address)
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        if far:
            ctypes.CDLL(None).unshare(NEW_NETWORK)
        serve(serve_socket(("0.0.0.0", PORT)) if held is None else held, told)
    try:
        os.read(ready, 1)
        if far:
            _connect_networks(pid)
        yield address if held is None else address_of(held), pid
    finally:
        if far:  # the kernel would take its time
            _do("ip", "link", "delete", f"near{pid}")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)
        if held is not None:
            held.close()


def serve(held: object, told: int) -> None:
    """Answers small frames until it is ended."""
    try:
        listener = Listener(held, KEY, role="server 0")  # type: ignore[arg-type]
        os.write(told, b".")
        connection = None
        while connection is None:
            connection = listener.accept(1.0)
        connection.limit = 1 << 30
        while (frame := connection.receive()) is not None:
            connection.send(frame.kind)
    finally:
        os._exit(1)


def _connect_networks(pid: int) -> None:
    near, far = f"near{pid}", f"far{pid}"
    _do("ip", "link", "add", near, "type", "veth", "peer", far, "netns", str(pid))
    _do("ip", "addr", "add", f"{HERE}/30", "dev", near)
    _do("ip", "link", "set", near, "up")
    _do(*_inside(pid), "ip", "addr", "add", f"{THERE}/30", "dev", far)
    _do(*_inside(pid), "ip", "link", "set", far, "up")


def _inside(pid: int) -> tuple[str, ...]:
    return "nsenter", "--target", str(pid), "--net"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=DEADLINE)


if __name__ == "__main__":
    main()
