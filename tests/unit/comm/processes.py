"""Members as real processes, with deadlines; a failing one's output is shown."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from echelon.comm import Group, Place

Body = Callable[[Group], Any]
"""One member's part; what it returns has to be JSON."""


@dataclass
class Child:
    pid: int
    output: IO[bytes]
    answer: IO[bytes]
    status: int | None = None

    def reap(self, block: bool = False) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


def run(
    count: int,
    body: Body,
    *,
    hosts: str | None = None,
    patience: float = 30.0,
    within: float = 100.0,
    may_die: Sequence[int] = (),
    machines: Sequence[str] | None = None,
) -> list[Any]:
    """What `body(group)` returned in each member, None for one that died, or froze, and may.

    `hosts`: a letter per member, the host it pretends to be on; `machines`: what it is.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = [
            Place(i, count, port=listener.getsockname()[1], deadline=patience) for i in range(count)
        ]
        kinds = machines or [platform.machine()] * count
        names = hosts or [None] * count
        children = [
            _fork(place, listener, _Pretence(name, kind), body)
            for place, name, kind in zip(places, names, kinds, strict=True)
        ]
    try:
        _wait([child for i, child in enumerate(children) if i not in may_die], within)
        return [_answer(i, child, i in may_die) for i, child in enumerate(children)]
    finally:
        for child in children:
            if not child.reap():
                os.kill(child.pid, signal.SIGKILL)
                child.reap(block=True)
            child.output.close()
            child.answer.close()


def _wait(children: Sequence[Child], within: float) -> None:
    deadline = time.monotonic() + within
    while sum(child.reap() for child in children) < len(children):
        if time.monotonic() > deadline:
            late = [child.pid for child in children if child.status is None]
            shown = "\n".join(_text(child.output) for child in children)
            pytest.fail(f"processes {late} are not done within {within} s\n{shown}")
        time.sleep(0.002)


def _answer(index: int, child: Child, may_die: bool) -> Any:
    if child.status == 0:
        return json.loads(_text(child.answer))
    if not may_die:
        pytest.fail(f"member {index} ended with {child.status}:\n{_text(child.output)}")
    return None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


class _Pretence(NamedTuple):
    host: str | None
    machine: str


def _fork(place: Place, listener: socket.socket, pretence: _Pretence, body: Body) -> Child:
    output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `run`
    answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if pid:
        return Child(pid, output, answer)
    code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.disable()
        torch.set_num_threads(1)
        if place.index == 0:
            place = replace(place, listener=listener.detach())
        else:
            listener.close()
        platform.machine = lambda: pretence.machine
        group = Group(place, host=pretence.host)
        try:
            found = body(group)
        finally:
            group.close()
        answer.write(json.dumps(found).encode())
        answer.flush()
        code = 0
    except BaseException:
        with os.fdopen(2, "w", closefd=False) as shown:
            traceback.print_exc(file=shown)
    finally:
        sys.stdout.flush()
        os._exit(code)


def traces() -> dict[str, int]:
    """What this process holds: descriptors, threads, mapped segments."""
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors.append(str(entry.readlink()))
        except OSError:  # the listing's own
            continue
    return {
        "descriptors": len([name for name in descriptors if not name.startswith("/proc")]),
        "threads": _threads(),
        "segments": Path("/proc/self/maps").read_text().count("memfd:echelon"),
    }


def _threads() -> int:
    """Once those that were joined are gone from the kernel's list too."""
    deadline = time.monotonic() + 1.0
    while (count := len(list(Path("/proc/self/task").iterdir()))) > 1:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return count


def bits(tensors: Sequence[Tensor]) -> int:
    """The same for the same bits."""
    held = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
    return hash(bytes(torch.cat(held).numpy()))
