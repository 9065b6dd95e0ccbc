"""The caller's side of a connection's beginning."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from echelon.comm.channel import handshake
from echelon.comm.channel.connection import Connection, Terms, visible
from echelon.comm.channel.handshake import Card, Refused
from echelon.comm.channel.life import SILENCE
from echelon.comm.channel.sockets import TICK, Address, open_socket, stays_here, words
from echelon.comm.peers import this_host
from echelon.core.errors import PeerError

_PAUSE = 0.02
_ATTEMPT = 2.0
"""Seconds for the network to bring about a connection."""


def unhalted() -> str | None:
    """Nothing calls this off."""
    return None


def connect(
    address: Address,
    key: bytes,
    *,
    role: str,
    deadline: float,
    patience: float = SILENCE,
    seal: bool | None = None,
    halted: Callable[[], str | None] = unhalted,
) -> Connection:
    """Tries for `deadline` seconds; somebody who refuses is not asked twice.

    `role` says who calls. `patience`: how many seconds a peer of another host may be silent. `seal`
    is whether to encrypt: None is as it has to be. `halted`: why nobody is to be waited for.
    """
    wait = _Wait(address, deadline, halted)
    while True:
        try:
            return _attempt(address, key, role, patience, seal, wait)
        except (OSError, EOFError) as error:
            wait.reason = getattr(error, "strerror", None) or str(error)
        wait.look()
        time.sleep(_PAUSE)


class _Wait:
    """Ends it in time."""

    def __init__(self, address: Address, deadline: float, halted: Callable[[], str | None]) -> None:
        self._until = time.monotonic() + deadline
        self._where, self._deadline, self._halted = words(address), deadline, halted
        self.reason = "somebody listens there, and does not answer"

    def look(self) -> None:
        if why := self._halted():
            raise PeerError(why)
        if time.monotonic() > self._until:
            raise PeerError(f"nobody at {self._where} within {self._deadline:g} s: {self.reason}")


def _attempt(
    address: Address, key: bytes, role: str, patience: float, seal: bool | None, wait: _Wait
) -> Connection:
    connected = open_socket(address, _ATTEMPT)
    try:
        connected.settimeout(TICK)
        card = Card(role, os.getpid(), this_host())
        terms = _greet(connected, key, card, seal, wait)._replace(where=words(address))
        return Connection(connected, terms._replace(patience=patience))
    except Refused as error:
        connected.close()
        raise PeerError(f"no connection to {words(address)}: {error}") from None
    except BaseException:
        connected.close()
        raise


def _greet(
    connected: socket.socket, key: bytes, card: Card, seal: bool | None, wait: _Wait
) -> Terms:
    wanted = not stays_here(connected) if seal is None else seal
    nonce = handshake.fresh_nonce()
    heard = _exactly(connected, handshake.CHALLENGE, wait)
    theirs, asked = handshake.read_challenge(heard)
    said = handshake.call(key, nonce, wanted, card, heard)
    connected.sendall(said)
    start = _exactly(connected, handshake.ANSWER, wait)
    reply = start + _exactly(connected, handshake.answer_length(start) - len(start), wait)
    peer = handshake.read_answer(key, reply, heard + said)
    found = handshake.keys(key, theirs, nonce, calling=True)
    pid = visible(peer, card, connected)
    return Terms(peer, "", found, wanted or asked, pid, SILENCE)


def _exactly(connected: socket.socket, count: int, wait: _Wait) -> bytes:
    found = bytearray()
    while len(found) < count:
        try:
            part = connected.recv(count - len(found))
        except TimeoutError:
            wait.look()
            continue
        if not part:
            raise EOFError("it hung up before it said who it is")
        found += part
    return bytes(found)
