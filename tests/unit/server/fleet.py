"""Servers and trainers as real processes, with deadlines. The output of a failing one is shown."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.comm.channel import Connection
from echelon.comm.ps.client import Servers
from echelon.comm.ps.messages import ShardAddress
from echelon.server.process import serve
from echelon.server.replication import Twin
from echelon.server.shard import ServerSettings
from tests.children import Child, answers, fork, wait

DEADLINE = 20.0
Body = Callable[[Servers, int], Any]
"""One trainer's part; what it returns has to be JSON."""


@dataclass
class Fleet:
    """The servers, as a supervisor holds them."""

    addresses: tuple[ShardAddress, ...]
    sockets: list[list[socket.socket]]
    key: bytes
    servers: dict[tuple[int, bool], Child] = field(default_factory=dict)

    def start(self, shard: int, *, twin: bool = False) -> None:
        settings = ServerSettings(shard, self.addresses, self.key, DEADLINE, twin)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self.servers[shard, twin] = fork(lambda: _serve(self.sockets[shard], settings))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def replace(self, shard: int) -> None:
        """As a supervisor does it; the twin is one that has all there is."""
        mark, until = _mark(self.servers[shard, True].pid), time.monotonic() + DEADLINE
        while not mark.exists():
            assert time.monotonic() < until, f"the twin of shard {shard} got nothing"
            time.sleep(0.0005)
        self.kill(shard)
        self.promote(shard)
        self.start(shard, twin=True)

    def kill(self, shard: int, *, twin: bool = False) -> None:
        child = self.servers.pop((shard, twin))
        os.kill(child.pid, signal.SIGKILL)
        child.reap(block=True)
        child.end()

    def promote(self, shard: int) -> None:
        child = self.servers.pop((shard, True))
        self.servers[shard, False] = child
        os.kill(child.pid, signal.SIGUSR1)

    def trainer(self, member: int, plane: str = "auto") -> Servers:
        return Servers(self.addresses, self.key, member, plane=plane, deadline=DEADLINE)

    def run(
        self,
        count: int,
        body: Body,
        *,
        plane: str = "auto",
        within: float = 60.0,
        may_die: Sequence[int] = (),
        besides: Callable[[], None] = lambda: None,
        started: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """What `body(servers, member)` returned in each trainer; None for one that may die."""
        children = [fork(lambda m=m: self._train(body, m, plane)) for m in range(count)]  # type: ignore[misc]
        try:
            for child in children:
                started(child.pid)
            besides()
            wait(children, within, self.servers.values())
            return answers(children, may_die, self.servers.values())
        finally:
            for child in children:
                child.end()

    def _train(self, body: Body, member: int, plane: str) -> Any:
        servers = self.trainer(member, plane)
        try:
            return body(servers, member)
        finally:
            servers.close()

    def close(self) -> list[int | None]:
        """How each server ended after SIGTERM."""
        for child in self.servers.values():
            if not child.reap():
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        while not all(child.reap() for child in self.servers.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        found = [child.status for child in self.servers.values()]
        for child in self.servers.values():
            child.end()
        for listening in self.sockets:
            for each in listening:
                each.close()
        return found


def _serve(sockets: list[socket.socket], settings: ServerSettings) -> None:
    """A twin leaves a mark as soon as it is what its shard is."""

    become = Twin._become

    def marking(self: Twin, connection: Connection, document: dict[str, Any]) -> None:
        become(self, connection, document)
        if document["incarnation"]:  # or nobody has uploaded anything yet
            _mark(os.getpid()).touch()

    Twin._become = marking  # type: ignore[method-assign]
    serve(sockets, settings)


def _mark(pid: int) -> Path:
    return Path(f"twin-{pid}")


@contextmanager
def fleet(shards: int = 1, *, replicas: int = 0) -> Iterator[Fleet]:
    sockets, addresses = [], []
    word = secrets.token_hex(6)
    for shard in range(shards):
        tcp = socket.create_server(("127.0.0.1", 0), backlog=64)
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"echelon-test-{word}-{shard}"
        near.bind(f"\0{name}")
        near.listen(64)
        sockets.append([tcp, near])
        addresses.append(ShardAddress(shard, "127.0.0.1", tcp.getsockname()[1], name))
    held = Fleet(tuple(addresses), sockets, secrets.token_bytes(32))
    try:
        for shard in range(shards):
            for twin in range(1 + replicas):
                held.start(shard, twin=bool(twin))
        yield held
        shown = "\n".join(child.text() for child in held.servers.values())
        ended = set(held.close()) - {0, -signal.SIGTERM}  # the latter: one that had not begun yet
        assert not ended, f"a server did not end well ({ended}):\n{shown}"
    finally:
        held.close()
