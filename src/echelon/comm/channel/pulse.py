"""One thread per process that lets all its peers know that it lives, and looks whether they do."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from echelon.comm.channel.sockets import TICK


class Patient(Protocol):
    def beat(self) -> None:
        """Called every tick, from another thread."""


class Pulse:
    """Runs as long as there is anybody to look at."""

    def __init__(self) -> None:
        self._patients: set[Patient] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, patient: Patient) -> None:
        with self._changed:
            self._patients.add(patient)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echelon-pulse", daemon=True)
                self._thread.start()

    def remove(self, patient: Patient) -> None:
        with self._changed:
            self._patients.discard(patient)
            if not self._patients:
                self._changed.notify()

    def _run(self) -> None:
        while patients := self._next():
            for patient in patients:
                patient.beat()

    def _next(self) -> list[Patient]:
        with self._changed:
            self._changed.wait_for(lambda: not self._patients, TICK)
            if not self._patients:
                self._thread = None
            return list(self._patients)


_PULSES = [Pulse()]


def pulse() -> Pulse:
    """This process's own."""
    return _PULSES[0]


def _forked() -> None:
    """The thread is not here, and its lock may be held for ever."""
    _PULSES[0] = Pulse()


os.register_at_fork(after_in_child=_forked)
