"""Servers and callers of all sides, as processes that are always ended.

They are forked, so that torch is imported once. What a side needs beyond that it imports itself.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .wire_sides import ALONE, SIDES, spins
from .wire_work import Client, timed

_PATIENCE = 120.0
_FORK = multiprocessing.get_context("fork")


class WireFailed(Exception):
    """A side does not do what it should."""


class Side:
    """A caller that does as it is told."""

    def __init__(self, name: str, pipe: Connection, pids: list[int]) -> None:
        self.name, self._pipe, self._pids = name, pipe, pids
        self._signal(signal.SIGSTOP)

    @property
    def cpu(self) -> float:
        """Milliseconds that all its processes have had so far."""
        return sum(map(_cpu, self._pids))

    def do(self, word: str, count: int) -> list[float]:
        """Milliseconds of each."""
        self._signal(signal.SIGCONT)
        self._pipe.send_bytes(json.dumps([word, count]).encode())
        found: list[float] = json.loads(said(self.name, self._pipe))
        self._signal(signal.SIGSTOP)
        return found

    def _signal(self, number: signal.Signals) -> None:
        """One that spins is stopped while it is others' turn: they have two cores, as it has."""
        for pid in self._pids if spins(self.name) else ():
            os.kill(pid, number)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def said(name: str, pipe: Connection) -> bytes:
    """The next thing it says, within a deadline."""
    if not pipe.poll(_PATIENCE):
        raise WireFailed(f"{name} says nothing for {_PATIENCE:g} s")
    try:
        return pipe.recv_bytes()
    except EOFError:
        raise WireFailed(f"{name} ended") from None


@contextmanager
def sides(names: list[str]) -> Iterator[dict[str, Side]]:
    """All servers, then all callers, ready to go."""
    with ExitStack() as stack:
        tempfile.tempdir = stack.enter_context(tempfile.TemporaryDirectory())
        servers = {
            name: stack.enter_context(_process(_serve, name)) for name in names if name not in ALONE
        }
        where = {name: said(name, pipe) for name, (pipe, _) in servers.items()}
        found = {}
        for name in names:
            pipe, pid = stack.enter_context(_process(_call, name, where.get(name)))
            said(name, pipe)
            serving = [servers[name][1]] if name in servers else []
            found[name] = Side(name, pipe, [pid, *serving])
        yield found


@contextmanager
def _process(body: Any, name: str, *given: Any) -> Iterator[tuple[Connection, int]]:
    """Our end of a pipe to it, and its id."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_alone, args=(body, ours, theirs, name, *given))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield ours, process.pid
    finally:
        process.kill()
        process.join()
        ours.close()


def _alone(body: Any, ours: Connection, *given: Any) -> None:
    ours.close()
    torch.set_num_threads(1)
    body(*given)


def _serve(pipe: Connection, name: str) -> None:
    module, _, serving, _ = SIDES[name]
    importlib.import_module(f"peers.{module}").serve(
        lambda where: pipe.send_bytes(where.encode()), *serving
    )


def _call(pipe: Connection, name: str, where: bytes | None) -> None:
    module, caller, _, calling = SIDES[name]
    made = getattr(importlib.import_module(f"peers.{module}"), caller)
    client: Client = made(*([where.decode()] if where is not None else []), *calling)
    pipe.send_bytes(b"ready")
    acts = {"exchange": client.exchange, "ask": client.ask}
    while True:
        try:
            word, count = json.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        pipe.send_bytes(json.dumps(timed(acts[word], count)).encode())
