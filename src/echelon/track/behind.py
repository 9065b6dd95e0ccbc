"""An observer that may be slow, kept out of training's way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from echelon.core.protocols import Observer
from echelon.track.text import warn

_CAPACITY = 10_000
_CLOSE_SECONDS = 60.0


class Behind:
    """Passes everything on from a thread of its own, in order.

    `finished` waits until all has been passed on. An observer that fails is told about once and
    hears no more; one that cannot keep up loses figures, and that is told too.
    """

    def __init__(self, observer: Observer, *, capacity: int = _CAPACITY) -> None:
        self._observer = observer
        self._name = type(observer).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        self._lost = 0
        self._thread: threading.Thread | None = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(
            target=self._work, name=f"echelon-{self._name}", daemon=True
        )
        self._thread.start()
        kept = dict(facts)
        self._pass(lambda: self._observer.started(run, kept))

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Not passed on: it is for eyes, and comes too often for a queue."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._pass(lambda: self._observer.logged(step, kept))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._pass(lambda: self._observer.evaluated(step, kept))

    def noticed(self, step: int, message: str) -> None:
        self._pass(lambda: self._observer.noticed(step, message))

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._thread is None:
            return
        kept = dict(summary)
        self._put(lambda: self._observer.finished(status, kept))
        self._put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            warn(f"{self._name} was not ready {_CLOSE_SECONDS:.0f} s after the end")
        if self._lost:
            warn(f"{self._name} could not keep up: {self._lost} records were left out")
        self._thread = None

    def _pass(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lost += 1

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            self._calls.put(call, timeout=_CLOSE_SECONDS)
        except queue.Full:
            self._lost += 1

    def _work(self) -> None:
        working = True
        while (call := self._calls.get()) is not None:
            if not working:
                continue  # emptied all the same, so that nobody waits for room
            try:
                call()
            except Exception as error:  # whatever it is: an observer never stops training
                warn(f"{self._name} failed and is left out: {type(error).__name__}: {error}")
                working = False
