"""A member of a run, as seen from inside its process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from echelon.cluster.pulse import Pulses
from echelon.comm.peers import Place


class Member:
    """What the work of one process gets: its place, and two ways to be heard."""

    __slots__ = ("_doing", "_lock", "_pulses", "_wire", "place")

    def __init__(self, place: Place, wire: int, pulses: Pulses) -> None:
        self.place = place
        self._wire = wire
        self._pulses = pulses
        self._doing = ""
        self._lock = threading.Lock()

    def tell(self, **facts: Any) -> None:
        """Let the supervisor keep these facts (plain JSON data), whatever becomes of us."""
        self.send(encoded("told", facts))

    def pulse(self, step: int, doing: str) -> None:
        """Where this member is; cheap enough for every step."""
        index = self.place.index
        if doing is not self._doing:  # most often the very same literal
            self._pulses.describe(index, doing)
            self._doing = doing
        self._pulses.beat(index, step)

    def send(self, line: bytes) -> None:
        """One line to the supervisor, which always listens."""
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[os.write(self._wire, rest) :]


def encoded(kind: str, content: Mapping[str, Any]) -> bytes:
    """A line as the supervisor reads it."""
    return json.dumps({kind: dict(content)}).encode() + b"\n"
