"""The coordinator's connections: one that does not read is noticed, and descriptors may run out."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from typing import Any

import pytest

from echelon.cluster.coordinator.connections import UNSENT, Line, Switchboard
from echelon.cluster.coordinator.protocol import (
    Message,
)


def test_one_that_does_not_read_is_noticed_before_it_costs_much_memory() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        connection, _ = listener.accept()
        with connection:
            line = Line(connection, "x", 0.0)
            part, put = bytes(1 << 20), 0
            while not line.is_clogged:
                line.put(part, part)
                line.flush()
                put += 2 * len(part)
                assert put < UNSENT + (64 << 20), "the kernel holds some of it, but not that much"
            assert line.has_unsent


class Tired(socket.socket):
    """Has no descriptor left for the first who comes."""

    awake = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.awake:
            self.awake = True
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Deaf:
    """Hears nothing of interest."""

    def take(self, now: float, line: Line, message: Message) -> None: ...

    def read_up(self, now: float) -> None: ...

    def hung_up(self, now: float, line: Line) -> None: ...


def test_without_descriptors_those_who_come_wait_and_are_let_in_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Tired() as listener, selectors.DefaultSelector() as selector:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            board = Switchboard(listener, selector, Deaf())
            counts = []
            for _ in range(2):
                board.tick(time.monotonic())
                for key, events in selector.select(30):
                    key.data(events)
                counts.append(len(board.lines))
            board.close_all()
    assert counts == [0, 1]
    assert "could not be accepted: Too many open files" in capsys.readouterr().err
