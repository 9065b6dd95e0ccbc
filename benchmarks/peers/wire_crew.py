"""Servers and callers of all sides, as processes that are always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .crew import environment
from .wire_seat import ALONE

_PATIENCE = 120.0


class WireFailed(Exception):
    """A side does not do what it should."""


class Side:
    """A caller that does as it is told."""

    def __init__(self, name: str, caller: subprocess.Popen[str]) -> None:
        self.name, self._caller = name, caller

    def do(self, word: str, count: int) -> list[float]:
        """Milliseconds of each."""
        assert self._caller.stdin is not None
        self._caller.stdin.write(f"{word} {count}\n")
        self._caller.stdin.flush()
        found: list[float] = json.loads(line_of(self.name, self._caller))
        return found


def line_of(name: str, process: subprocess.Popen[str]) -> str:
    """Its next line, within a deadline."""
    assert process.stdout is not None
    late = threading.Timer(_PATIENCE, process.kill)
    late.start()
    try:
        line = process.stdout.readline()
    finally:
        late.cancel()
    if not line:
        raise WireFailed(f"{name} said nothing within {_PATIENCE:g} s, or ended")
    return line.strip()


@contextmanager
def sides(names: list[str]) -> Iterator[dict[str, Side]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        found = {}
        for name in names:
            where = []
            if name not in ALONE:
                where = [line_of(name, stack.enter_context(_process(folder, name, "serve")))]
            caller = stack.enter_context(_process(folder, name, "call", *where))
            if line_of(name, caller) != "ready":
                raise WireFailed(f"{name} did not begin")
            found[name] = Side(name, caller)
        yield found


@contextmanager
def _process(folder: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "peers.wire_seat", *words],
        env=environment() | {"TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
