"""Calls into native code that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns or raises, or TimeoutError.

    torch's store waits for its server without a deadline and deaf to signals: a server that is
    stopped, or a host that lost its power, would hold this process for ever. So the call is made
    by a thread that can be left behind.
    """
    answers: list[T] = []
    faults: list[BaseException] = []

    def make() -> None:
        try:
            answers.append(call())
        except BaseException as fault:  # raised again by whoever waits
            faults.append(fault)

    aside(make).join(seconds)
    if faults:
        raise faults[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def aside(call: Callable[[], Any]) -> threading.Thread:
    """Begin `call` in a thread that does not keep the process from ending."""
    thread = threading.Thread(target=call, name="echelon-aside", daemon=True)
    thread.start()
    return thread
