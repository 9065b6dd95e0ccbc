"""Peers in processes that may be killed, stopped or busy; always reaped."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from echelon.cluster.workers import only
from echelon.comm.channel import Address, Connection, Listener
from echelon.comm.channel.sockets import address_of, serve_socket

from .pairs import KEY

Body = Callable[[Connection], None]


@contextmanager
def listening(address: Address, body: Body, patience: float = 1.5) -> Iterator[tuple[Address, int]]:
    """Where a child listens for one caller, to whom it then does `body`; and its process."""
    held = serve_socket(address)
    pid = os.fork()
    if not pid:
        only(lambda: _serve(held, body, patience))
    try:
        yield address_of(held), pid
    finally:
        held.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(held: socket.socket, body: Body, patience: float) -> None:
    listener = Listener(held, KEY, role="server 0", patience=patience)
    while (connection := listener.accept(1.0)) is None:
        pass
    body(connection)


def echo(connection: Connection) -> None:
    """Every frame goes back."""
    while True:
        frame = connection.receive()
        assert frame is not None
        connection.send(frame.kind, frame.head, [connection.take_bytes()], seq=frame.seq)


def answers(connection: Connection) -> bool:
    """Whether `echo` is at the other end."""
    connection.send(1, b"are you there?", [b"body"])
    frame = connection.receive(10.0)
    told = frame is not None and frame.head == b"are you there?"
    return told and connection.take_bytes() == b"body"


def hold_the_interpreter(seconds: float) -> None:
    """One long call during which no other thread of this process runs any Python."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
