"""zmq, DEALER to ROUTER, in chunks of 1 MiB that neither end copies more often than it must."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from .wire_work import CHUNK, LOOPBACK, NUMBERS, REQUEST, Shard, flat, touched

_BYTES = NUMBERS * 4
_SMALL = b"r" * REQUEST


def serve(ready: Callable[[str], None]) -> None:
    shard = Shard()
    inward = flat(shard.gradients)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        _unbounded(server)
        ready(str(server.bind_to_random_port(f"tcp://{LOOPBACK}")))
        at = 0
        while True:
            caller = server.recv()
            at += server.recv_into(inward[at : at + CHUNK])
            if at == REQUEST:  # no chunk is that short
                server.send(caller, zmq.SNDMORE)
                server.send(_SMALL)
                at = 0
            elif at == _BYTES:
                for chunk in shard.chunks():
                    server.send(caller, zmq.SNDMORE)
                    server.send(chunk.numpy(), copy=False)
                at = 0


class Caller:
    def __init__(self, port: str) -> None:
        gradients, weights = touched(), touched()
        self._kept = gradients, weights
        self._out = flat(gradients)
        self._in = flat(weights)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _unbounded(self._socket)
        self._socket.connect(f"tcp://{LOOPBACK}:{port}")

    def exchange(self) -> None:
        for at in range(0, _BYTES, CHUNK):
            self._socket.send(self._out[at : at + CHUNK], copy=False)
        at = 0
        while at < _BYTES:
            at += self._socket.recv_into(self._in[at : at + CHUNK])

    def ask(self) -> None:
        self._socket.send(_SMALL)
        self._socket.recv()

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def _unbounded(socket: zmq.Socket[bytes]) -> None:
    """All chunks of one direction may be under way."""
    socket.set_hwm(0)
    socket.setsockopt(zmq.SNDBUF, 4 << 20)
    socket.setsockopt(zmq.RCVBUF, 4 << 20)
