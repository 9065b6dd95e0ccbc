"""The limits: bytes one way over TCP with nothing else, a copy, and the update alone."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from .wire_work import LOOPBACK, NUMBERS, REQUEST, bare, flat, touched

_BYTES = NUMBERS * 4
_PIECE = 1 << 20


def serve(ready: Callable[[str], None]) -> None:
    """Takes 100 MB into its memory, then says so with one byte."""
    memory = touched()
    inward = flat(memory)
    with socket.socket() as listener:
        _cubic(listener)
        listener.bind((LOOPBACK, 0))
        listener.listen()
        ready(str(listener.getsockname()[1]))
        caller, _ = listener.accept()
    with caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (size := int.from_bytes(caller.recv(8), "little")) > 0:
            at = 0
            while at < size:
                at += caller.recv_into(inward[at : min(size, at + _PIECE)])
            caller.sendall(b"." if size > REQUEST else inward[:size])


class Caller:
    def __init__(self, port: str) -> None:
        self._kept = touched()
        self._out = flat(self._kept)
        self._socket = socket.socket()
        _cubic(self._socket)
        self._socket.connect((LOOPBACK, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self) -> None:
        """One way."""
        self._socket.sendall(_BYTES.to_bytes(8, "little"))
        self._socket.sendall(self._out)
        self._socket.recv(1)

    def ask(self) -> None:
        self._socket.sendmsg([REQUEST.to_bytes(8, "little"), self._out[:REQUEST]])
        left = REQUEST
        while left:
            left -= len(self._socket.recv(left))

    def close(self) -> None:
        self._socket.close()


class Update:
    """The bare fused step on 100 MB, in this process."""

    def __init__(self, optimizer: str) -> None:
        weights = touched().requires_grad_(True)
        weights.grad = touched()
        self._step = bare(optimizer, weights)

    def exchange(self) -> None:
        self._step()

    def ask(self) -> None:
        raise AssertionError("there is nobody to ask")

    def close(self) -> None:
        return


class Copy(Update):
    """100 MB from here to there."""

    def __init__(self) -> None:
        self._from, self._to = touched(), touched()

    def exchange(self) -> None:
        torch.Tensor.copy_(self._to, self._from)


def _cubic(opened: socket.socket) -> None:
    """As Echelon does it: the host's default may be BBR, which is slower here."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
