"""Several observers as one; the failure of any of them stays its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from echelon.core.protocols import Observer
from echelon.track.recorder import Recorder
from echelon.track.text import warn


class Observers:
    """Passes everything on. One that fails is told about once and left out from then on.

    As a context manager it sees to it that `finished` is heard whatever happens inside, so that
    threads end and the terminal gets its cursor back.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)
        self._finished = False

    def add(self, observer: Observer) -> None:
        """One more, from now on."""
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
        """Another process tells from now on: nobody here hears anything any more."""
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
            except Exception as error:  # whatever it is: an observer never stops training
                failed.append(observer)
                name = type(observer).__name__
                warn(f"{name} failed and is left out: {type(error).__name__}: {error}")
        if failed:
            self._observers = [kept for kept in self._observers if kept not in failed]
