"""Writes a run's figures to the store, beside the training and never in its way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from echelon.core.errors import EchelonError
from echelon.track.records import Event, Point, Status
from echelon.track.store import Store
from echelon.track.text import warn

INTERVAL_SECONDS = 1.0
CAPACITY = 100_000
"""Records kept while the store cannot be written; then the oldest go."""
_CLOSE_SECONDS = 30.0

_Record = tuple[int, float, Mapping[str, float] | str, str]
"""(step, time, figures or a message, prefix of the figures' names)"""


class Recorder:
    """An observer that only appends to a queue; a thread empties it about once a second.

    Figures of training become the series `train/…`, held-out ones `valid/…`. A store that fails
    is told about once; its records wait for the next attempt.
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
        """Nothing to keep: `logged` says what is."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._records.append((step, time.time(), _floats(values), "train/"))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._records.append((step, time.time(), _floats(values), "valid/"))
        self._wake.set()

    def noticed(self, step: int, message: str) -> None:
        self._records.append((step, time.time(), message, ""))
        self._wake.set()

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write what is left; the run's end is recorded even if some figures could not be."""
        self.close()
        self._attempt(lambda: self._store.finish(self._run, cast(Status, status), summary))

    def close(self) -> None:
        """End the thread and write what is left."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
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
            # The queue's end is fixed first: the loop goes on appending while this runs.
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
    """A copy, checked here: in the thread a wrong value would spoil the whole batch."""
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
