"""Signals as data: none comes too late, and those that are not for members stay here."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

import pytest

from echelon.cluster.environment import caught, held_back
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from tests.cluster.shared import DEADLINE, SOON, Counters, wait_for

pytestmark = pytest.mark.timeout(120)


def test_a_signal_that_interrupts_no_wait_ends_it_all_the_same() -> None:
    """One that comes just before a wait begins, or in another thread, as here."""

    def other() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(DEADLINE)

    ended, waiting = threading.Event(), select.poll()
    with caught() as signals, held_back():
        waiting.register(signals.reader, select.POLLIN)
        thread = threading.Thread(target=other)
        thread.start()
        found = waiting.poll(SOON * 1000)
        ended.set()
        thread.join()
        assert found
        assert os.read(signals.reader, 9) == bytes([signal.SIGINT])


def test_signals_that_are_not_for_members_stay_with_the_supervisor() -> None:
    seen = Counters(1)

    def note(*_: object) -> None:
        seen[0] += 1

    def work(_: Member) -> dict[str, Any]:
        os.kill(os.getppid(), signal.SIGUSR1)
        wait_for(lambda: seen[0])
        return {"done": True}

    before = signal.signal(signal.SIGUSR1, note)
    try:
        assert launch(1, work, deadline=5) == {"done": True}
    finally:
        signal.signal(signal.SIGUSR1, before)
