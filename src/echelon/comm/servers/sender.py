"""Sends what is ready while the trainer goes on computing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Sender:
    """A thread that does one job after the other. After a failure it does none, and tells of it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._open = 0
        self._thread = threading.Thread(target=self._work, name=f"echelon-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def flush(self, seconds: float) -> bool:
        """Wait until all is sent. False: not within so many seconds."""
        with self._idle:
            done = self._idle.wait_for(lambda: self._open == 0 or self._error is not None, seconds)
        if self._error is not None:
            raise self._error
        return done

    @property
    def busy(self) -> bool:
        return self._open > 0

    def close(self) -> None:
        """Whoever closes has closed the connection before, so no job lasts."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised again by whoever waits for it
                    self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
