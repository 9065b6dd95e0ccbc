"""Memory that a process keeps after freeing it causes no page faults in the next step."""

from __future__ import annotations

import resource
import subprocess
import sys

_STEPS = """
import ctypes, resource, sys
if sys.argv[1] == "keep":
    from echelon.core.process import keep_freed_memory
    keep_freed_memory()
malloc, free, memset = (getattr(ctypes.CDLL(None), n) for n in ("malloc", "free", "memset"))
malloc.restype = ctypes.c_void_p
free.argtypes = [ctypes.c_void_p]
memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def step():
    held = [malloc(8 << 20) for _ in range(8)]
    for block in held:
        memset(block, 1, 8 << 20)
    for block in held:
        free(block)
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, how], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def test_steps_that_reuse_what_the_last_one_freed_fault_no_pages() -> None:
    pages = 5 * (64 << 20) // resource.getpagesize()
    assert _faults("keep") < pages // 20 < pages // 2 < _faults("not")
