"""Which of this host's processes end, told by the kernel at once."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from echelon.cluster.coordinator.roster import Member


class Watch:
    """One handle per process; it stays with its process even if the number is used again."""

    def __init__(self, selector: selectors.BaseSelector, died: Callable[[Member], None]) -> None:
        self._selector, self._died = selector, died
        self._handles: dict[int, int] = {}

    def over(self, member: Member, handle: int) -> None:
        """From now on; a second handle for a member takes the place of the first."""
        self.end(member.id)
        self._handles[member.id] = handle
        self._selector.register(handle, selectors.EVENT_READ, lambda _events: self._ended(member))

    def end(self, member: int) -> None:
        handle = self._handles.pop(member, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)

    def close(self) -> None:
        for member in list(self._handles):
            self.end(member)

    def _ended(self, member: Member) -> None:
        self.end(member.id)
        self._died(member)
