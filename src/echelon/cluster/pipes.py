"""The descriptors between a supervisor and its members: made before the first fork."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

_HOST = "127.0.0.1"


class Pipes:
    """Who holds what: a member keeps its own ends and closes all others, and so does the parent.

    | | written by | read by |
    |---|---|---|
    | `wires` → `reports` | each member: what it tells and how it ends | the supervisor |
    | `voices` → `texts` | members 1 …: what they print | member 0, then the supervisor |
    | `listener` | – | member 0: serves the store that members find each other by |
    """

    def __init__(self, count: int, besides: Iterable[int] = ()) -> None:
        """`besides` are descriptors of the parent that are closed in members only."""
        self._besides = tuple(besides)
        self._open: set[int] = set()
        self.wires: dict[int, int] = {}
        self.reports: dict[int, int] = {}
        self.voices: dict[int, int] = {}
        self.texts: dict[int, int] = {}
        try:
            for index in range(count):
                self.reports[index], self.wires[index] = self._pipe()
            for index in range(1, count):
                self.texts[index], self.voices[index] = self._pipe()
            self.listener, self.port = self._listen(count)
        except BaseException:
            self.close()
            raise

    def own(self, descriptor: int) -> int:
        """Close this one too, here at the end and in every member forked from now on."""
        self._open.add(descriptor)
        return descriptor

    def keep_only(self, index: int) -> None:
        """In a member: close what belongs to others."""
        kept = {self.wires[index]}
        kept |= {self.listener, *self.texts.values()} if index == 0 else {self.voices[index]}
        self._close(self._open - kept)
        for descriptor in self._besides:
            os.close(descriptor)

    def keep_reading(self) -> None:
        """In the supervisor, when all members are there: close their ends."""
        self._close({*self.wires.values(), *self.voices.values(), self.listener})

    def close(self) -> None:
        self._close(set(self._open))

    def _close(self, descriptors: set[int]) -> None:
        for descriptor in descriptors & self._open:
            self._open.discard(descriptor)
            os.close(descriptor)

    def _pipe(self) -> tuple[int, int]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        return self.own(reader), self.own(writer)

    def _listen(self, count: int) -> tuple[int, int]:
        with socket.create_server((_HOST, 0), backlog=max(64, 2 * count)) as server:
            port: int = server.getsockname()[1]
            return self.own(server.detach()), port
