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
from echelon.comm.channel.sockets import Address, open_socket, stays_here, words
from echelon.comm.peers import this_host
from echelon.core.errors import PeerError

_PAUSE = 0.02
_ATTEMPT = 2.0


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
    until = time.monotonic() + deadline
    while True:
        try:
            return _attempt(address, key, role, patience, seal)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error) or "it hung up"
        if why := halted():
            raise PeerError(why)
        if time.monotonic() > until:
            raise PeerError(f"nobody at {words(address)} within {deadline:g} s: {reason}")
        time.sleep(_PAUSE)


def _attempt(
    address: Address, key: bytes, role: str, patience: float, seal: bool | None
) -> Connection:
    connected = open_socket(address, _ATTEMPT)
    try:
        terms = _greet(connected, address, key, Card(role, os.getpid(), this_host()), seal)
        return Connection(connected, terms._replace(patience=patience))
    except Refused as error:
        connected.close()
        raise PeerError(f"no connection to {words(address)}: {error}") from None
    except BaseException:
        connected.close()
        raise


def _greet(
    connected: socket.socket, address: Address, key: bytes, card: Card, seal: bool | None
) -> Terms:
    wanted = not stays_here(connected) if seal is None else seal
    nonce = handshake.fresh_nonce()
    heard = _exactly(connected, handshake.CHALLENGE)
    theirs, asked = handshake.read_challenge(heard)
    said = handshake.call(key, nonce, wanted, card, heard)
    connected.sendall(said)
    start = _exactly(connected, handshake.ANSWER)
    reply = start + _exactly(connected, handshake.answer_length(start) - len(start))
    peer = handshake.read_answer(key, reply, heard + said)
    found = handshake.keys(key, theirs, nonce, calling=True)
    pid = visible(peer, card, connected)
    return Terms(peer, words(address), found, wanted or asked, pid, SILENCE)


def _exactly(connected: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connected.recv(count - len(found))
        if not part:
            raise EOFError("it hung up before it said who it is")
        found += part
    return bytes(found)
