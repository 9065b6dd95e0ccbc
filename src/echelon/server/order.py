"""Entries are carried out one after the other, by whichever thread comes by.

No thread waits for another one to wake up: whoever brings an entry carries it out, and what others
bring meanwhile. So a trainer alone is answered by the thread that heard it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from echelon.server.entry import Entry


class Later(Exception):
    """An entry was put back: it cannot be carried out before somebody is back who was lost."""


class Order:
    def __init__(
        self, carry_out: Callable[[Entry], None], may: Callable[[Entry], bool] = lambda _: True
    ) -> None:
        self._carry_out, self._may = carry_out, may
        self._entries: deque[Entry] = deque()
        self._busy = threading.Lock()

    def add(self, entry: Entry) -> None:
        """By whoever knows that it is the next one; `work` has to follow."""
        self._entries.append(entry)

    def work(self) -> None:
        """Leave no entry behind that nobody is at work on."""
        while self._is_due() and self._busy.acquire(blocking=False):
            try:
                while self._is_due():
                    self._carry_out(self._entries.popleft())
            except Later:
                return
            finally:
                self._busy.release()

    def put_back(self, entry: Entry) -> None:
        """By whoever carries it out, and could not yet."""
        self._entries.appendleft(entry)

    @property
    def pending(self) -> list[Entry]:
        """What nobody has begun; for whoever keeps it quiet."""
        return list(self._entries)

    def _is_due(self) -> bool:
        entries = self._entries
        try:
            return self._may(entries[0])
        except IndexError:  # another thread was faster
            return False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No entry is carried out meanwhile; what comes is, afterwards."""
        with self.still():
            yield
        self.work()

    @contextmanager
    def still(self) -> Iterator[None]:
        """The same, but somebody else has to `work` afterwards."""
        with self._busy:
            yield

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """The same, and those that are not begun are dropped."""
        with self._busy:
            self._entries.clear()
            yield
