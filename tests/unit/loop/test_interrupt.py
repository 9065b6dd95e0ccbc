"""The first signal asks the run to stop, the second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from echelon.loop import interrupt
from echelon.loop.interrupt import on_interrupt

ASKING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def send(*numbers: signal.Signals) -> list[str]:
    """What is asked for when these signals come while a run is under way."""
    asked: list[str] = []
    with on_interrupt(asked.append):
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.001)  # until Python has heard of it
    return asked


@pytest.mark.parametrize("number", ASKING)
def test_one_signal_asks_and_handlers_come_back(number: signal.Signals) -> None:
    before = {number: signal.getsignal(number) for number in ASKING}
    assert send(number) == [number.name]
    assert {number: signal.getsignal(number) for number in ASKING} == before


@pytest.mark.parametrize("first", ASKING)
@pytest.mark.parametrize("second", ASKING)
def test_any_second_signal_ends_it(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals, second: signal.Signals
) -> None:
    monkeypatch.setattr(interrupt, "SAME_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        send(first, second)


def test_a_signal_that_comes_twice_at_once_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals the process and then its group."""
    monkeypatch.setattr(interrupt, "SAME_SECONDS", 60.0)
    assert send(signal.SIGTERM, signal.SIGTERM) == ["SIGTERM"]


def test_under_nohup_a_closed_terminal_is_no_wish() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert send(signal.SIGHUP) == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with on_interrupt(lambda _name: None):
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [before]
