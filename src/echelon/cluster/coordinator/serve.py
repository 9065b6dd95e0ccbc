"""A coordinator's whole life, from the journal it finds to the last member's leave."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from echelon.cluster.coordinator.desk import Desk
from echelon.cluster.coordinator.post import Log, Post
from echelon.cluster.coordinator.processes import look
from echelon.cluster.coordinator.replay import replay
from echelon.cluster.coordinator.server import Server
from echelon.cluster.coordinator.settings import Settings
from echelon.comm.peers import this_host


def serve(
    listener: socket.socket,
    settings: Settings,
    journal: Log,
    past: Iterable[Mapping[str, Any]],
    store: tuple[str, int],
    *,
    attended: bool = True,
) -> bool:
    """Coordinate until SIGTERM, or until the run has ended and all members have left.

    Returns whether it has ended. One that is not `attended`, or is told so by SIGUSR1, ends the run
    when nobody is left, instead of waiting for others to join.

    `past` is what the journal holds: killed and called again with it and the same `listener`, the
    coordinator goes on where it was, and its members come back by themselves. Neither the listener
    nor the journal is closed: they are the caller's.
    """
    now = time.monotonic()
    desk = Desk(settings, store, this_host(), look, now)
    again = replay(desk, past, store, now)
    desk.outbox.note("coordinator", pid=os.getpid(), again=again)
    with (
        _undisturbed(),
        closing(Server(listener, desk, Post(journal, desk.outbox))) as server,
        _signalled(server),
    ):
        server.attended = attended
        server.run()
        over = server.is_over
    journal.sync()
    return over


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Many descriptors, and no pauses to look through what was there before."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _signalled(server: Server) -> Iterator[None]:
    """Ctrl-C is for the supervisor: it decides what becomes of the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: object) -> None:
        server.stopping = True

    def leave_alone(_number: int, _frame: object) -> None:
        server.attended = False

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, leave_alone)
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
