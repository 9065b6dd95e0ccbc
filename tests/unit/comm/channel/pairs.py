"""Both ends of a connection, in one process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from echelon.comm.channel import Address, Connection, Listener, connect

KINDS = ("tcp", "unix", "sealed")
KEY = bytes(range(32))


def address(kind: str) -> Address:
    return f"echelon-test-{secrets.token_hex(8)}" if kind == "unix" else ("127.0.0.1", 0)


@contextmanager
def pair(kind: str) -> Iterator[tuple[Connection, Connection]]:
    """The caller's end and the listener's."""
    seal = kind == "sealed"
    listener = Listener(address(kind), KEY, role="server 0", seal=seal)
    try:
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(connect, listener.address, KEY, role="trainer 1", deadline=5.0)
            theirs = listener.accept(5.0)
            ours = calling.result(5)
        assert theirs is not None
    finally:
        listener.close()
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()
