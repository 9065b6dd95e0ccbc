"""A server process: it holds a shard of the parameters, and shard 0's process is the gate, too.

listener ─▶ connection ─▶ a thread each:  trainer → Conversation
                                          shard   → its place at the gate's desk
                                          twin    → its copy of all that is done here
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
from typing import Any

from echelon.comm.channel import Connection, Listener, Segment
from echelon.comm.ps.messages import PushHead
from echelon.comm.ps.state import Part
from echelon.core.errors import PeerError
from echelon.server.dispatch import Desk
from echelon.server.peers import GateLink, Mirror, Twin, borrow
from echelon.server.sessions import Conversation, PeerTalk
from echelon.server.shard import Holding, ServerSettings, Shard

__all__ = ["ServerSettings", "serve"]

_ACCEPT = 0.5


def serve(listeners: Sequence[socket.socket], settings: ServerSettings) -> None:
    """The whole life of a server process, in its main thread: until SIGTERM. SIGUSR1 has a twin
    take the place of its shard."""
    role = Role(settings)
    signal.signal(signal.SIGTERM, lambda *_: role.end())
    signal.signal(signal.SIGUSR1, lambda *_: role.promote())
    # Whoever started this process held it back until there was somebody to hear it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    role.run(listeners)


class Role:
    """What the threads of a server process share."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.shard = Shard(settings.shard, len(settings.shards))
        self._ended = threading.Event()
        self._signal = threading.Event()
        """It is to end, or to take its shard's place."""
        self._mirror = Mirror(self.shard, settings.deadline)
        self.shard.mirror = self._mirror
        self._uploading = 0
        """The incarnation that an upload will have."""
        self._threads: set[threading.Thread] = set()
        self._connections: set[Connection] = set()
        self._desk = Desk(self.shard, settings) if settings.shard == 0 else None
        self._link = (
            None if settings.shard == 0 else GateLink(settings, self.shard, self._ended.is_set)
        )
        if self._desk is not None:
            self._desk.mirror = self._mirror
            self._mirror.snapshot, self._mirror.gated = self._desk.snapshot, self._desk.quiet
            # Another shard's link looks by itself, again and again.
            self._mirror.aside = lambda: self._begin("after", self.shard.order.work)

    @property
    def gate(self) -> Desk:
        if self._desk is None:
            raise PeerError("asks a shard that is not the gate")
        return self._desk

    def run(self, listeners: Sequence[socket.socket]) -> None:
        if self.settings.twin:
            self._stand_by()
        if not self._ended.is_set():
            self._work(listeners)
        self._close()

    def _stand_by(self) -> None:
        """Follow the shard, until it is lost and this process is to be it."""
        twin = Twin(self.settings, self.shard, self._signal.is_set)
        self._begin("twin", twin.run)
        while not self._signal.wait(1.0):
            continue
        twin.stop()
        if self._desk is not None and twin.gate is not None:
            holding = self.shard.holding
            self._desk.prepare(holding.rules, len(holding.layout.slots))
            self._desk.take_over(twin.gate, list(twin.past), twin.scales, twin.decided)

    def _work(self, listeners: Sequence[socket.socket]) -> None:
        if self._link is not None:
            self._begin("gate", self._link.run)
        if self._desk is not None and self.shard.count > 1:
            self._begin("order", lambda: self.gate.work(self._ended.is_set))
        name = f"server {self.settings.shard}"
        for listening in listeners:
            memory = listening.family == socket.AF_UNIX
            listener = Listener(
                listening,
                self.settings.key,
                role=name,
                patience=self.settings.deadline,  # it is the coordinator who gives trainers up
                refused=self._say,
            )
            self._begin("listener", lambda x=listener, m=memory: self._listen(x, m))  # type: ignore[misc]
        while not self._ended.wait(1.0):
            continue

    def end(self) -> None:
        self._ended.set()
        self._signal.set()

    def promote(self) -> None:
        self._signal.set()

    # What conversations need.

    def set_up(self, conversation: Conversation, document: Any) -> None:
        self.shard.set_up(document, self._lend, self._prepare)
        if self._desk is not None:
            self._desk.arrived(conversation.member, conversation)

    def _prepare(self, holding: Holding) -> None:
        if self._desk is not None:
            self._desk.prepare(holding.rules, len(holding.layout.slots))

    def load(self, part: Part, incarnation: int, state: dict[str, Any]) -> None:
        """All but the rows of tables."""
        self._uploading = 0
        self.shard.load(part, 0, int(state.get("version", 0)), self._lend)
        if self._desk is not None:
            self._desk.load(state, incarnation)
        self._uploading = incarnation

    def uploaded(self, incarnation: int) -> None:
        """All of an upload is here: from now on it counts."""
        if incarnation != self._uploading:
            raise PeerError("an upload is said to be whole that another one has replaced")
        self.shard.incarnation = incarnation
        if self._link is not None:
            self._link.greet()
        self._mirror.refresh()

    def gate_state(self) -> dict[str, Any]:
        return {} if self._desk is None else self._desk.state()

    def pushed(self, conversation: Conversation, seq: int, head: PushHead) -> None:
        if self._desk is not None:
            self._desk.push(conversation.member, seq, head)
        elif self._link is not None:
            self._link.staged(conversation.member, seq)

    def left(self, conversation: Conversation) -> None:
        if self._desk is not None and conversation.member >= 0:
            self._desk.left(conversation.member, conversation)

    def figures(self, asking: int) -> dict[str, float]:
        """The shard's own, what the gate has counted for whoever asks, and everybody's merit."""
        found = self.shard.figures()
        if self._desk is not None and self.shard.incarnation:
            for member, values in self._desk.figures().items():
                judged = {key: values[key] for key in ("merit", "rejected") if key in values}
                found |= {f"member_{member}_{key}": float(value) for key, value in judged.items()}
                if member == str(asking):
                    found |= {f"gate_{key}": float(value) for key, value in values.items()}
        return found

    # Threads and connections.

    def _lend(self, size: int) -> Segment | None:
        if self.settings.shard == 0:
            return Segment.create(size)
        return borrow(self.settings, size)

    def _listen(self, listener: Listener, memory: bool) -> None:
        try:
            while not self._ended.is_set():
                connection = listener.accept(_ACCEPT)
                if connection is not None:
                    self._welcome(connection, memory)
        finally:
            listener.close()

    def _welcome(self, connection: Connection, memory: bool) -> None:
        kind = connection.card.role.partition(" ")[0]
        if kind == "trainer":
            talk = Conversation(self, connection, memory=memory).run
        elif kind == "shard" and self._desk is not None:
            talk = PeerTalk(self._desk, self.shard, connection).run
        elif kind == "twin":
            talk = functools.partial(self._mirror.talk, connection)
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
                told = str(error).removeprefix(connection.peer).strip()
                self._say(f"{connection.peer} is hung up on: {told}")
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
        """A shard that met a fault of its own is not to be trusted any more."""
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
        if self._link is not None:
            self._link.close()
        for connection in list(self._connections):
            connection.close()
