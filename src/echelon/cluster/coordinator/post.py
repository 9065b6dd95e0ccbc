"""The journal as the coordinator writes it."""

from __future__ import annotations

from typing import Any, Protocol

from echelon.cluster.coordinator.outbox import SYNCED, Outbox
from echelon.core.errors import TrainingError
from echelon.core.format import warn

_SYNC = 30.0
"""Seconds that a power cut may take back; the kernel itself would let it take no less."""
_GIVE_UP = 60.0
"""Seconds after which a journal that cannot be written ends the coordinator."""


class Log(Protocol):
    """`echelon.data.journal.Journal`, or what is like it."""

    def add(self, kind: str, **fields: Any) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Post:
    """Writes what is in the outbox, in order; a full disk delays it and loses nothing."""

    def __init__(self, journal: Log, outbox: Outbox) -> None:
        self._journal, self._outbox = journal, outbox
        self._failing: float | None = None
        self._unsynced = self._urgent = False
        self._synced = float("-inf")

    def write(self, now: float) -> bool:
        """Whether everything is written."""
        notes = self._outbox.notes
        while notes:
            kind, fields = notes[0]
            try:
                self._journal.add(kind, **fields)
            except (TrainingError, OSError) as error:
                self._failed(now, error)
                return False
            notes.popleft()
            self._unsynced = True
            self._urgent |= kind in SYNCED
        self._failing = None
        return True

    def sync(self) -> None:
        """Now, if what was written is worth it."""
        if self._urgent:
            self._sync()

    def tick(self, now: float) -> None:
        if self._unsynced and now - self._synced >= _SYNC:
            self._synced = now
            self._sync()

    def _sync(self) -> None:
        self._unsynced = self._urgent = False
        try:
            self._journal.sync()
        except (TrainingError, OSError) as error:
            warn(f"coordinator: {error}")

    def _failed(self, now: float, error: Exception) -> None:
        if self._failing is None:
            self._failing = now
            warn(f"coordinator: {error}; nothing is answered until it can be written")
        elif now - self._failing > _GIVE_UP:
            raise error
