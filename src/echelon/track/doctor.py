"""Checks behind `echelon doctor`: each tries the real thing and says what it means for training."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from echelon.core.errors import EchelonError
from echelon.core.format import size
from echelon.track import environment
from echelon.track.store import Store, connected

Verdict = Literal["ok", "warn", "fail"]
_GB = 1_000_000_000
_OLDEST_PYTHON = (3, 11)
_SHM = Path("/dev/shm")
_PROBE_BYTES = 8_000_000
_SECONDS = 5.0


class Check(NamedTuple):
    """One result: verdict, measured figure, and what it means for training."""

    name: str
    verdict: Verdict
    figure: str
    meaning: str


def check_all(folder: Path) -> list[Check]:
    """Run every check; one that raises counts as failed and does not end the others."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("torch", check_torch),
        ("cores", check_cores),
        ("memory", check_memory),
        ("disk", lambda: check_disk(folder)),
        ("shared memory", check_shared_memory),
        ("gpu", check_gpu),
        ("ports", check_ports),
        ("store", lambda: check_store(folder)),
    ]
    return [_tried(name, check) for name, check in checks]


def check_python(found: tuple[int, ...] = sys.version_info[:3]) -> Check:
    figure = ".".join(map(str, found))
    if found < _OLDEST_PYTHON:
        return Check("python", "fail", figure, "Echelon needs Python 3.11 or newer.")
    return Check("python", "ok", figure, "New enough for Echelon.")


def check_torch() -> Check:
    begun = time.perf_counter()
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", "not there", f"Nothing can be trained: {error}.")
    seconds = time.perf_counter() - begun
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    threads = torch.get_num_threads()
    figure = f"{torch.__version__}, {build}, {threads} threads, imported in {seconds:.1f} s"
    if threads > environment.usable_cores():
        return Check(
            "torch",
            "warn",
            figure,
            "More threads than usable cores slow each other: set `threads`.",
        )
    return Check("torch", "ok", figure, "Kernels use as many threads as this machine has cores.")


def check_cores() -> Check:
    usable, seen = environment.usable_cores(), os.cpu_count() or 1
    figure = f"{usable} usable" + (f" of {seen}" if usable < seen else "")
    if usable < 2:
        return Check(
            "cores", "warn", figure, "Loading and training share one core: expect slow runs."
        )
    return Check("cores", "ok", figure, f"Up to {usable} workers train at full speed here.")


def check_memory() -> Check:
    free, total = environment.memory_free(), environment.memory_bytes()
    figure = f"{size(free)} free of {size(total)}"
    if free < _GB:
        return Check("memory", "fail", figure, "Even a small model may be killed for memory.")
    # fp32 weights, their gradients and Adam's two moments: 16 bytes each, half left for the rest.
    largest = f"{free / 2 / 16 / 1e9:.1f} billion"
    verdict: Verdict = "warn" if free < 4 * _GB else "ok"
    return Check("memory", verdict, figure, f"Room for about {largest} parameters with Adam.")


def check_disk(folder: Path) -> Check:
    """Check free space where runs are kept, and how fast a checkpoint reaches the disk."""
    place = environment.existing(folder)
    free = shutil.disk_usage(place).free
    probe = os.urandom(_PROBE_BYTES)
    with tempfile.NamedTemporaryFile(dir=place, prefix=".echelon-") as file:
        begun = time.perf_counter()
        file.write(probe)
        file.flush()
        os.fsync(file.fileno())
        speed = _PROBE_BYTES / (time.perf_counter() - begun)
    figure = f"{size(free)} free in {place}, {size(speed)}/s"
    if free < _GB:
        return Check("disk", "fail", figure, "Checkpoints may not fit: free some space.")
    if free < 10 * _GB:
        return Check("disk", "warn", figure, "Enough for small models; large checkpoints fill it.")
    return Check("disk", "ok", figure, f"Saving 1 GB takes about {_GB / speed:.1f} s.")


def check_shared_memory() -> Check:
    """Check both kinds: anonymous files in memory (memfd) and /dev/shm."""
    _probe_memfd()
    if not _SHM.is_dir():
        return Check("shared memory", "warn", "memfd only", "There is no /dev/shm: use memfd only.")
    free = shutil.disk_usage(_SHM).free
    figure = f"{size(free)} free in {_SHM}, memfd works"
    if free < 2 * _PROBE_BYTES:
        return Check("shared memory", "fail", figure, "Too small: start with a larger --shm-size.")
    with tempfile.TemporaryFile(dir=_SHM) as file:
        _write_mapped(file.fileno())
    if free < _GB:
        return Check(
            "shared memory", "warn", figure, "Workers may run out of it: use a larger --shm-size."
        )
    return Check("shared memory", "ok", figure, "Workers on this machine can pass tensors by it.")


def check_gpu() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("gpu", "warn", "unknown", f"Without torch it cannot be said: {error}.")
    if not torch.cuda.is_available():
        return Check("gpu", "ok", "none", "Models train on the CPU; nothing else is missing.")
    count = torch.cuda.device_count()
    first = torch.cuda.get_device_properties(0)
    figure = f"{count} × {first.name}, {size(first.total_memory)}"
    torch.ones(8, device="cuda").sum().item()
    return Check("gpu", "ok", figure, "`device: auto` trains on it.")


def check_ports() -> Check:
    """Bind any free port on loopback, connect to it and pass a few bytes."""
    begun = time.perf_counter()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_SECONDS)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), _SECONDS) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"echelon")
                arrived = far.recv(7, socket.MSG_WAITALL)
    if arrived != b"echelon":
        return Check("ports", "fail", f"port {port}", f"Loopback lost bytes: got {arrived!r}.")
    micros = (time.perf_counter() - begun) * 1e6
    return Check(
        "ports", "ok", f"port {port} in {micros:.0f} µs", "Processes on this machine can connect."
    )


def check_store(folder: Path) -> Check:
    """Read the existing store, or create one in a scratch folder on the same disk."""
    store = Store(folder)
    if store.path.exists():
        with connected(store.path) as file:
            found = file.execute("PRAGMA quick_check(1)").fetchone()[0]
            count = file.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
        if found != "ok":
            return Check("store", "fail", str(store.path), f"It is damaged: {found}.")
        return Check("store", "ok", f"{count} runs in {store.path}", "Runs are recorded in it.")
    place = environment.existing(folder)
    with tempfile.TemporaryDirectory(dir=place, prefix=".echelon-") as scratch:
        probe = Path(scratch) / "probe.db"
        with connected(probe) as file:
            mode = file.execute("PRAGMA journal_mode").fetchone()[0]
    if mode != "wal":
        return Check("store", "warn", f"journal {mode}", "Many writers at once will wait in line.")
    return Check("store", "ok", f"none yet in {folder}", "The first run makes it.")


def _tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (OSError, RuntimeError, EchelonError) as error:
        return Check(name, "fail", "did not work", f"{type(error).__name__}: {error}")


def _probe_memfd() -> None:
    file = os.memfd_create("echelon-probe")
    try:
        _write_mapped(file)
    finally:
        os.close(file)


def _write_mapped(file: int) -> None:
    """Map the file and touch every page: a limit shows only when memory is really used."""
    os.posix_fallocate(file, 0, _PROBE_BYTES)
    with mmap.mmap(file, _PROBE_BYTES) as view:
        view[:] = b"\x5a" * _PROBE_BYTES
        if view[-1] != 0x5A:
            raise OSError("shared memory does not keep what is written to it")
