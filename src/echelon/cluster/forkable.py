"""Whether this process may be forked into members, and what has to end before.

A fork copies one thread. Whatever the other ones were about to do, a lock to give back or a part of
a kernel to compute, never happens in the copy, which then waits for them for ever.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

from echelon.core.errors import UserError

_HARD = 2
"""omp_pause_hard: end the threads, not only free what they hold."""
_INSTEAD = "start it with `echelon train` or torchrun instead"


def make_forkable() -> None:
    """Refuse where a fork cannot be safe; end the idle kernel threads where it can be made so."""
    _check_threads()
    _check_torch()
    _end_kernel_threads()


def _check_threads() -> None:
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        raise UserError(
            f"workers can only be started before other threads: {', '.join(sorted(others))} "
            f"still run in this process; end them, or {_INSTEAD}"
        )


def _check_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise UserError(
            "workers cannot be started after CUDA was used in this process, for its state does "
            "not survive a fork; start it with torchrun instead"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "workers cannot be started in a process that is a member of a torch.distributed "
            "group; call torch.distributed.destroy_process_group() before"
        )


def _end_kernel_threads() -> None:
    """OpenMP keeps its threads after the first kernel and expects to find them after a fork.

    Measured: a kernel on two threads in the parent, then one in the child: the child hangs.
    Other pools (OpenBLAS, Arrow) look after themselves when a process forks. The threads come
    back by themselves with the next kernel, in the parent and in each member.
    """
    for library in _openmp():
        pause = getattr(library, "omp_pause_resource_all", None)
        if pause is None or pause(_HARD) != 0:
            raise UserError(
                "workers cannot be started while kernel threads run in this process and cannot "
                "be paused; set OMP_NUM_THREADS=1 and torch.set_num_threads(1) before the first "
                f"computation, or {_INSTEAD}"
            )


def _openmp() -> list[ctypes.CDLL]:
    """Every copy of GNU's OpenMP in this process: torch and scikit-learn bring one each."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]
