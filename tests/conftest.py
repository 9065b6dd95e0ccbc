"""No test may leave anything behind: threads, processes, sockets, shared memory, open files."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

GRACE = 5.0
"""Seconds for what is ending to be gone, on a busy machine too."""

# How long an example took says something about the machine, not about what is tried.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Undo signals that were ignored when pytest was started, by nohup or as a background job.

    Processes that tests start would inherit the ignoring, and could not be stopped by a signal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # A handler, not SIG_DFL: new programs start with the default, and nohup still protects us.
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = _traces()
    yield
    deadline = time.monotonic() + GRACE
    while left := _traces() - before:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(sorted(left))}")
        gc.collect()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _same_threads_and_seed() -> Iterator[None]:
    """Each test starts alike, whichever ran before it in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to `runs` below the current folder: give every test its own."""
    monkeypatch.chdir(tmp_path)


def _traces() -> set[str]:
    return {*_threads(), *_children(), *_shared_memory(), *_descriptors()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.name.startswith(("echelon", "Thread-")):
            yield f"thread {thread.name}"


def _children() -> Iterator[str]:
    for child in multiprocessing.active_children():
        yield f"process {child.pid}"
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:  # a thread that has just ended
            continue
        yield from (f"process {child}" for child in children)


def _shared_memory() -> Iterator[str]:
    folder = Path("/dev/shm")
    for entry in folder.iterdir() if folder.is_dir() else ():
        if "echelon" in entry.name:
            yield f"shared memory {entry.name}"


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed while we looked
            continue
        if target.startswith(("socket:", "/memfd:echelon")) or "/pytest-" in target:
            yield f"open {target} as descriptor {entry.name}"
