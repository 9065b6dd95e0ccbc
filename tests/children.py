"""Forked processes with deadlines, that answer in JSON; a failing one's output is shown."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import pytest
import torch


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

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode()

    def found(self) -> Any:
        self.answer.seek(0)
        return json.loads(self.answer.read())

    def end(self) -> None:
        if not self.reap():
            os.kill(self.pid, signal.SIGKILL)
            self.reap(block=True)
        self.output.close()
        self.answer.close()


def fork(body: Callable[[], Any]) -> Child:
    """What `body` returns has to be JSON."""
    output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
    answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if pid:
        return Child(pid, output, answer)
    code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        faulthandler.disable()
        torch.set_num_threads(1)
        answer.write(json.dumps(body()).encode())
        answer.flush()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: Sequence[Child], within: float, others: Iterable[Child] = ()) -> None:
    """Until all have ended; `others` may know why if they do not."""
    deadline = time.monotonic() + within
    while sum(child.reap() for child in children) < len(children):
        if time.monotonic() > deadline:
            late = [child.pid for child in children if child.status is None]
            shown = "\n".join(child.text() for child in (*children, *others))
            pytest.fail(f"processes {late} are not done within {within} s\n{shown}")
        time.sleep(0.002)


def answers(
    children: Sequence[Child], may_die: Sequence[int] = (), others: Iterable[Child] = ()
) -> list[Any]:
    """What each returned; None for one that died, and may."""
    for at, child in enumerate(children):
        if child.status != 0 and at not in may_die:
            shown = "\n".join(one.text() for one in (child, *others))
            pytest.fail(f"member {at} ended with {child.status}:\n{shown}")
    return [child.found() if child.status == 0 else None for child in children]
