"""Half precision on CPUs that promise more than they keep.

Some virtual machines announce matrix instructions (AMX) that then end the process with an
illegal instruction. So before a run computes in half precision on a CPU, a child process tries
it; if the child dies, the kernels that kill it are switched off, in the narrowest way that helps.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import resource
import signal
import time
from typing import Literal

import torch

from echelon.core.errors import ConfigError

_DEADLINE = 20.0
"""Seconds for the trial in a child process."""
_WITHOUT_AMX = "AVX512_CORE_BF16"
"""The widest instruction set of oneDNN that does not use AMX."""


def make_usable(device: torch.device, precision: str) -> None:
    """Make sure that this precision works on this device, or refuse it."""
    if device.type == "cpu" and precision != "fp32":
        _make_usable(precision)


@functools.cache
def _make_usable(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    if _survives(dtype):
        return
    # Effective only if no such kernel has run in this process yet; child processes inherit it.
    os.putenv("ONEDNN_MAX_CPU_ISA", _WITHOUT_AMX)
    if _survives(dtype):
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if not _survives(dtype):
        raise ConfigError(
            f"precision {precision!r} ends the process on this CPU: use fp32", ("precision",)
        )
    logging.getLogger("echelon").warning(
        "%s is slow in this process: its fast kernels crash on this CPU, and it was too late to "
        "choose others; a new process with ONEDNN_MAX_CPU_ISA=%s is fast",
        precision,
        _WITHOUT_AMX,
    )


def state_of_bf16() -> Literal["works", "works without AMX", "crashes"]:
    """Return how `precision: bf16` works on this CPU."""
    if _survives(torch.bfloat16):
        return "works"
    os.putenv("ONEDNN_MAX_CPU_ISA", _WITHOUT_AMX)
    return "works without AMX" if _survives(torch.bfloat16) else "crashes"


def _survives(dtype: torch.dtype) -> bool:
    """Return whether a child process survives the operations of a training step."""
    child = os.fork()
    if child == 0:
        _try(dtype)
    status = None
    try:
        status = _awaited(child)
    finally:
        if status is None:  # too slow, or this process was interrupted: leave no child behind
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return status == 0


def _awaited(child: int) -> int | None:
    """Return the child's exit code, or None if it did not end in time."""
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _try(dtype: torch.dtype) -> None:
    """Run products and convolutions, small and large, forward and backward; never return."""
    code = 1
    try:
        faulthandler.disable()  # being killed here is an expected answer, not a fault to report
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # the parent's worker threads do not exist in a forked child
        for size in (32, 256):
            x = torch.ones(size, size, dtype=dtype, requires_grad=True)
            (x @ x).sum().backward()
        image = torch.ones(4, 16, 12, 12, dtype=dtype, requires_grad=True)
        filters = torch.ones(32, 16, 3, 3, dtype=dtype, requires_grad=True)
        torch.nn.functional.conv2d(image, filters).sum().backward()
        code = 0
    finally:
        os._exit(code)
