"""Observers of a run: the fan-out to all of them, and the two that work on threads of their own.

Observers never change training, and their failure never stops it:

    loop ─▶ Observers ─┬─▶ progress (on the caller's thread: fast)
                       ├─▶ Recorder: queue ─▶ thread ─▶ run store
                       └─▶ Behind: queue ─▶ thread ─▶ any slow observer (exporters)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, cast

from echelon.core.errors import EchelonError
from echelon.core.format import warn
from echelon.core.interfaces import Observer
from echelon.track.records import Event, Point, Status
from echelon.track.store import Store


class Observers:
    """Several observers as one. An observer that fails is reported once and removed.

    As a context manager it calls `finished` however the block ends, so that threads end and the
    terminal gets its cursor back.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self._finished = False

    def add(self, observer: Observer) -> None:
        """Add an observer; it hears of later events only."""
        self._observers.append(observer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            interrupted = kind is not None and not issubclass(kind, Exception)
            self.finished("stopped" if interrupted else "failed", {})

    def pass_on(self) -> None:
        """Detach all observers: another process observes the run from now on."""
        observers, self._observers = self._observers, []
        for observer in observers:
            if isinstance(observer, Recorder):
                observer.close()
            else:
                observer.finished("passed on to another member", {})

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.started(run, facts))

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.progressed(step, values))

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.logged(step, values))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(lambda observer: observer.evaluated(step, values))

    def noticed(self, step: int, message: str) -> None:
        self._tell(lambda observer: observer.noticed(step, message))

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        self._finished = True
        self._tell(lambda observer: observer.finished(status, summary))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        failed: list[Observer] = []
        for observer in self._observers:
            try:
                call(observer)
            except Exception as error:  # any failure: an observer never stops training
                failed.append(observer)
                name = type(observer).__name__
                warn(f"{name} failed and is left out: {type(error).__name__}: {error}")
        if failed:
            self._observers = [kept for kept in self._observers if kept not in failed]


# A slow observer on a thread of its own


_CAPACITY = 10_000


_CLOSE_SECONDS = 60.0


class Behind:
    """Calls a slow observer from a thread of its own, in order.

    `finished` waits until the queue is empty. An observer that fails is reported once and called no
    more. If it cannot keep up, records are dropped and the number is reported.
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
        """Skip: progress is for displays and comes too often for a queue."""

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
                continue  # keep emptying the queue, so that `_put` does not block
            try:
                call()
            except Exception as error:  # any failure: an observer never stops training
                warn(f"{self._name} failed and is left out: {type(error).__name__}: {error}")
                working = False


# The observer that fills the run store


INTERVAL_SECONDS = 1.0


CAPACITY = 100_000
"""Records kept while the store cannot be written; beyond it the oldest are dropped."""


_RECORDER_CLOSE_SECONDS = 30.0


_Record = tuple[int, float, Mapping[str, float] | str, str]
"""(step, time, values or a message, prefix of the values' names)"""


class Recorder:
    """Records a run in the store. Calls append to a queue; a thread writes about once a second.

    Training values become the series `train/…`, validation values `valid/…`. A store that fails
    is reported once; the records wait for the next attempt.
    """

    def __init__(self, store: Store, run: str, *, interval: float = INTERVAL_SECONDS) -> None:
        self._store = store
        self._run = run
        self._interval = interval
        self._records: deque[_Record] = deque(maxlen=CAPACITY)
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._writing = threading.Lock()
        self._warned = False
        self._thread: threading.Thread | None = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(
            target=self._work, args=(run, dict(facts)), name="echelon-recorder", daemon=True
        )
        self._thread.start()

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Skip: `logged` delivers the values to record."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._records.append((step, time.time(), _floats(values), "train/"))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._records.append((step, time.time(), _floats(values), "valid/"))
        self._wake.set()

    def noticed(self, step: int, message: str) -> None:
        self._records.append((step, time.time(), message, ""))
        self._wake.set()

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the remaining records, then the end of the run, even if some records were lost."""
        self.close()
        self._attempt(lambda: self._store.finish(self._run, cast(Status, status), summary))

    def close(self) -> None:
        """End the thread and write the remaining records."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_RECORDER_CLOSE_SECONDS)
            self._thread = None
        self._flush()
        if self._records:
            warn(f"{len(self._records)} records of run {self._run} could not be kept")

    def _work(self, run: str, facts: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._store.describe(run, facts))
        while not self._ending.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            self._flush()

    def _flush(self) -> None:
        with self._writing:
            # Fix the number first: the training loop keeps appending while this runs.
            batch = [self._records.popleft() for _ in range(len(self._records))]
            points, events = _unpacked(batch)
            if not batch or self._attempt(lambda: self._store.record(self._run, points, events)):
                return
            room = CAPACITY - len(self._records)
            self._records.extendleft(reversed(batch[max(0, len(batch) - room) :]))

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except (EchelonError, OSError) as error:
            if not self._warned:
                warn(f"run {self._run} is not being recorded: {error}; training goes on")
            self._warned = True
            return False
        return True


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    """Copy and check the values here: in the thread, one wrong value would fail the whole batch."""
    return {name: float(value) for name, value in values.items()}


def _unpacked(batch: list[_Record]) -> tuple[list[Point], list[Event]]:
    points: list[Point] = []
    events: list[Event] = []
    for step, moment, content, prefix in batch:
        if isinstance(content, str):
            events.append(Event(step, moment, content))
        else:
            points += [Point(step, prefix + name, v, moment) for name, v in content.items()]
    return points, events
