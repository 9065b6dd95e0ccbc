"""Ctrl-C is delayed while a process is being started, so that the process is always ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from echelon.core.process import interrupts_wait
from echelon.data.prepare.workers import Workers


def interrupted(done: list[str], error: Exception | None = None) -> None:
    with interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        done.append("what was begun")
        if error is not None:
            raise error


def test_an_interrupt_comes_when_the_moment_is_over() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["what was begun"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_not_lost_to_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as told:
        interrupted([], ValueError("inside"))
    assert isinstance(told.value.__context__, ValueError)


def test_an_ignored_interrupt_stays_ignored() -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupted(done)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["what was begun"]


def test_workers_that_are_being_started_are_ended_too() -> None:
    mine = Path(f"/proc/self/task/{os.getpid()}/children")
    before = mine.read_text()

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while mine.read_text() == before and time.monotonic() < deadline:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)

    def start_and_end() -> None:
        Workers(3, {}).close()
        other.join(20)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        start_and_end()
    other.join(20)
    assert mine.read_text() == before
