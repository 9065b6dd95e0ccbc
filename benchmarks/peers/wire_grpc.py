"""gRPC: a stream of chunks of 1 MiB in each direction, with no serialisation but bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from .wire_work import CHUNK, LOOPBACK, NUMBERS, REQUEST, Shard, flat, touched

_BYTES = NUMBERS * 4
_SMALL = b"r" * REQUEST
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def serve(ready: Callable[[str], None]) -> None:
    shard = Shard()
    inward = flat(shard.gradients)

    def push_pull(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        at = 0
        for chunk in chunks:
            inward[at : at + len(chunk)] = chunk
            at += len(chunk)
        for part in shard.chunks():
            yield part.numpy().tobytes()

    methods = {
        "exchange": grpc.stream_stream_rpc_method_handler(push_pull),
        "ask": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
    }
    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("wire", methods),))
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    ready(str(port))
    threading.Event().wait()


class Caller:
    def __init__(self, port: str) -> None:
        gradients, weights = touched(), touched()
        self._kept = gradients, weights
        self._out = flat(gradients)
        self._in = flat(weights)
        self._channel = grpc.insecure_channel(f"{LOOPBACK}:{port}", options=_OPTIONS)
        self._exchange = self._channel.stream_stream("/wire/exchange")
        self._ask = self._channel.unary_unary("/wire/ask")

    def exchange(self) -> None:
        at = 0
        for chunk in self._exchange(self._pieces()):
            self._in[at : at + len(chunk)] = chunk
            at += len(chunk)
        assert at == _BYTES

    def _pieces(self) -> Iterator[bytes]:
        for at in range(0, _BYTES, CHUNK):
            yield bytes(self._out[at : at + CHUNK])

    def ask(self) -> None:
        self._ask(_SMALL)

    def close(self) -> None:
        self._channel.close()
