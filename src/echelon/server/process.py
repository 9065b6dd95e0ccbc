"""A server process: it holds one shard, and the process of shard 0 also runs the gate.

    listener ─▶ connection ─▶ a thread each:  trainer → Conversation (sessions.py)
                                              shard   → PeerTalk (sessions.py)
                                              twin    → Mirror.talk (replication.py)

A process that is started as a twin first copies all that its shard does, without listening. Once it
is promoted, it takes over the shard's sockets and does the same as any other server process.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from echelon.comm.channel import Connection, Listener
from echelon.core.errors import PeerError
from echelon.server.replication import Twin
from echelon.server.service import ShardService
from echelon.server.sessions import Conversation, PeerTalk
from echelon.server.shard import ServerSettings

__all__ = ["ServerSettings", "serve"]
_ACCEPT = 0.5
"""Seconds between two checks of a listener whether the process has to end."""


def serve(listeners: Sequence[socket.socket], settings: ServerSettings) -> None:
    """Run a server process in its main thread until SIGTERM. SIGUSR1 promotes a twin."""
    role = Role(settings)
    signal.signal(signal.SIGTERM, lambda *_: role.end())
    signal.signal(signal.SIGUSR1, lambda *_: role.promote())
    # The parent blocks SIGUSR1 before it starts this process: unhandled, the signal would kill it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    role.run(listeners)


class Role:
    """The threads and connections of a server process, around its `ShardService`."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._ended = threading.Event()
        self._signal = threading.Event()
        """Set to end the process, and to promote a twin."""
        self._threads: set[threading.Thread] = set()
        self._connections: set[Connection] = set()
        self._service = ShardService(settings, self._ended.is_set)
        if self._service.desk is not None:
            # The thread that hears a new twin must not apply entries: it has to hear the twin's
            # acknowledgements meanwhile. Other shards' links look for entries by themselves.
            work = self._service.shard.order.work
            self._service.mirror.aside = lambda: self._begin("after", work)

    def run(self, listeners: Sequence[socket.socket]) -> None:
        if self.settings.twin:
            self._stand_by()
        if not self._ended.is_set():
            self._work(listeners)
        self._close()

    def end(self) -> None:
        self._ended.set()
        self._signal.set()

    def promote(self) -> None:
        self._signal.set()

    def _stand_by(self) -> None:
        """Follow the shard until this process is promoted, then take over its gate, too."""
        shard, desk = self._service.shard, self._service.desk
        twin = Twin(self.settings, shard, self._signal.is_set)
        self._begin("twin", twin.run)
        while not self._signal.wait(1.0):
            continue
        twin.stop()
        if desk is not None and twin.gate is not None:
            holding = shard.holding
            desk.prepare(holding.rules, len(holding.layout.slots))
            desk.take_over(twin.gate, list(twin.past), twin.scales, twin.decided)

    def _work(self, listeners: Sequence[socket.socket]) -> None:
        link, desk = self._service.link, self._service.desk
        if link is not None:
            self._begin("gate", link.run)
        if desk is not None and self._service.shard.count > 1:
            self._begin("order", lambda: desk.work(self._ended.is_set))
        name = f"server {self.settings.shard}"
        for listening in listeners:
            memory = listening.family == socket.AF_UNIX
            listener = Listener(
                listening,
                self.settings.key,
                role=name,
                patience=self.settings.deadline,  # the coordinator decides when a trainer is lost
                refused=self._say,
            )
            self._begin("listener", lambda x=listener, m=memory: self._listen(x, m))  # type: ignore[misc]
        while not self._ended.wait(1.0):
            continue

    def _listen(self, listener: Listener, memory: bool) -> None:
        try:
            while not self._ended.is_set():
                connection = listener.accept(_ACCEPT)
                if connection is not None:
                    self._welcome(connection, memory)
        finally:
            listener.close()

    def _welcome(self, connection: Connection, memory: bool) -> None:
        service = self._service
        kind = connection.card.role.partition(" ")[0]
        if kind == "trainer":
            talk = Conversation(service, connection, memory=memory).run
        elif kind == "shard" and service.desk is not None:
            talk = PeerTalk(service.desk, service.shard, connection).run
        elif kind == "twin":
            talk = functools.partial(service.mirror.talk, connection)
        else:
            connection.close()
            self._say(f"{connection.peer} has no business here")
            return
        self._connections.add(connection)
        self._begin(connection.card.role, lambda: self._talk(connection, talk))

    def _talk(self, connection: Connection, talk: Callable[[], None]) -> None:
        try:
            talk()
        except PeerError as error:
            gone = f"{connection.peer} closed the connection or ended"
            if not self._ended.is_set() and str(error) != gone:
                reason = str(error).removeprefix(connection.peer).strip()
                self._say(f"{connection.peer} is hung up on: {reason}")
        finally:
            connection.close()
            self._connections.discard(connection)

    def _begin(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self._guarded, args=(body,), name=f"echelon-{name}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a thread's body; end the process on a bug, because its weights may be wrong now."""
        try:
            body()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        finally:
            self._threads.discard(threading.current_thread())

    def _say(self, line: str) -> None:
        print(f"server {self.settings.shard}: {line}", file=sys.stderr, flush=True)

    def _close(self) -> None:
        if self._service.link is not None:
            self._service.link.close()
        for connection in list(self._connections):
            connection.close()
