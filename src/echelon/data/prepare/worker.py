"""A worker's process: it takes tasks from its wire until that is closed.

Its first steps come before numpy is imported: that starts as many threads as there are cores.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from echelon.core.process import give_back_freed_memory, keep_freed_memory
from echelon.data.prepare import wire

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 0.1
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def live(descriptor: int, parent: int) -> None:
    """Be a worker of `parent`, whose end is this one's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        return
    for name in _THREADS:
        os.putenv(name, "1")  # one core each: there are as many workers as cores
    keep_freed_memory()  # a block needs what the one before it gave back
    with socket.socket(fileno=descriptor) as line:
        try:
            _serve(line)
        except wire.Gone:
            sys.exit(0)


def _serve(line: socket.socket) -> None:
    setting, _ = wire.receive(line)
    from echelon.data.prepare.answers import answered
    from echelon.data.prepare.work import Work, one_thread

    one_thread()

    @cache
    def work() -> Work:  # made by the first task, so that a mistake in it is told
        return Work(setting)

    def do(task: Mapping[str, Any], data: bytearray) -> Any:
        return work().do(task, memoryview(data))

    stage = None
    while True:
        if not select.select([line], [], [], _IDLE_SECONDS)[0]:
            give_back_freed_memory()  # the parent is at something that needs it
        task, data = wire.receive(line)
        if task["stage"] != stage:
            stage = task["stage"]
            give_back_freed_memory()
        wire.send(line, answered(do, task, data))
