"""Counters and small rows of numbers that members of one host show each other.

Every member writes its own page alone and reads all of them. A member first writes what it has to
say, then raises a counter; whoever sees the counter raised sees what was written before it. That
rests on two things: an aligned store of eight bytes is never seen in part, and stores become
visible in the order they were made. x86-64 promises both (and memcpy ends its streaming stores
with a fence); Python can order nothing itself, so members on other machines go through torch.

    member 0:  numbers of ticket 7 → counter 7 ──┐          ┌─ sees 7: reads both rows
    member 1:  numbers of ticket 7 → counter 7 ──┴─ waits ──┴─ sees 7: reads both rows

Rows are kept twice and used in turn. A row of ticket 9 overwrites that of ticket 7 only after
counter 8 of every member, and nobody raises that before having read what ticket 7 said.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from echelon.comm.interface import MOST_VALUES
from echelon.comm.peers import Peer, Watch
from echelon.comm.shared_memory import PAGE
from echelon.core.errors import PeerError

# Counters, each on a cache line of its own.
TICKET, LEFT, READY, FREED, REDUCED = range(5)
_COUNTED = (TICKET, READY, FREED, REDUCED)
_LINE = 64 // 8
_WORDS = PAGE // 8
_ROWS = 1024 // 8  # where the rows begin, in words
_REASON, _LENGTH = 3072, 1024  # where in its page, in bytes, a member says why it broke down
_CLOSED, _BROKEN = 1, 2  # what LEFT says
UPDATES = 2  # shelves 0 and 1 hold rows of meetings, 2 and 3 of a gradient sum's updates

# To yield at once is as quick as to spin where a core is free for every member, and three times as
# quick where members outnumber cores or others are at work on them.
_YIELD = 0.001  # seconds of giving the core away before sleeping
_SLEEP = 0.05  # of the time waited so far,
_LONGEST = 0.0005  # but at most so many seconds
_STOPPED = 1.0  # seconds that no wait between two looks takes
_LOOK = 0.05  # seconds between looks whether the awaited still live


class Board:
    """`members` in order; `memory` is one page for each of them."""

    def __init__(
        self, memory: Tensor, members: Sequence[Peer], index: int, watch: Watch, deadline: float
    ) -> None:
        self.members, self.index, self.count = members, index, len(members)
        self._watch, self._deadline = watch, deadline
        self._bytes = memoryview(memory.numpy())  # type: ignore[arg-type]
        self._words = self._bytes.cast("q")
        self._numbers = self._bytes.cast("d")
        pages = [member * _WORDS for member in range(self.count)]
        self._mine = pages[index]
        self._all = [[page + column * _LINE for page in pages] for column in range(5)]
        self._others = [cells[:index] + cells[index + 1 :] for cells in self._all]
        self._rows = [[page + _ROWS + shelf * MOST_VALUES for page in pages] for shelf in range(4)]
        self._ticket = 0
        self._error: PeerError | None = None

    def post(self, column: int, value: int) -> None:
        """Raise one of this member's counters."""
        self._words[self._mine + column * _LINE] = value

    def least(self, column: int) -> int:
        """How far the last of all members is."""
        words = self._words
        return min([words[cell] for cell in self._all[column]])

    def write(self, shelf: int, values: Sequence[float], offset: int = 0) -> None:
        start = self._rows[shelf][self.index] + offset
        self._numbers[start : start + len(values)] = array("d", values)

    def read(self, shelf: int, length: int, offset: int = 0) -> list[list[float]]:
        """What every member wrote there."""
        numbers: Any = self._numbers
        return [numbers[at + offset : at + offset + length].tolist() for at in self._rows[shelf]]

    @property
    def next(self) -> int:
        """Which of two buffers used in turn belongs to the next meeting."""
        return (self._ticket + 1) & 1

    def barrier(self) -> int:
        """Wait until all have called it as often; returns which buffers belonged to it."""
        self.check()
        self._ticket = ticket = self._ticket + 1
        self._words[self._mine] = ticket
        self.wait(TICKET, ticket, "it was awaited at meeting {}", ticket)
        return ticket & 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """At most 64 values; added up in the order of the members, so alike everywhere."""
        self.check()
        self.write(self.next, values)
        return [sum(column) for column in zip(*self.read(self.barrier(), len(values)), strict=True)]

    def check(self) -> None:
        """After a failure nobody knows how far the others came: all that follows fails too."""
        if self._error is not None:
            raise self._error

    def wait(self, column: int, goal: int, what: str, number: int) -> None:
        """Until this counter of all others is at least `goal`; `what` has {} for `number`."""
        words = self._words
        for cell in self._others[column]:
            if words[cell] < goal:
                self._linger(column, cell, goal, what.format(number))

    def _linger(self, column: int, cell: int, goal: int, what: str) -> None:
        words = self._words
        looked = start = last = time.monotonic()
        while words[cell] < goal:
            now = time.monotonic()
            if now - last > _STOPPED:  # this process itself was: nobody was late
                start += now - last
            last = now
            if now - looked > _LOOK:
                looked = now
                self._look(column, goal, now - start, what)
            if now - start < _YIELD:
                os.sched_yield()
            else:
                time.sleep(min((now - start) * _SLEEP, _LONGEST))

    def _look(self, column: int, goal: int, waited: float, what: str) -> None:
        """Give up on members that cannot come any more, those that ended first of all."""
        words = self._words
        self.check()
        if self._watch.halt.why is not None:
            self.fail(PeerError(f"{self._watch.halt.why}; {what}"))
            self.check()
        ended = [self._watch.ended(peer) for peer in self.members]
        gone = [words[cell] for cell in self._all[LEFT]]
        # Only now: whoever ended or left may have come here before.
        late = [at for at, cell in enumerate(self._all[column]) if words[cell] < goal]
        for at in late:
            if ended[at] and gone[at] != _BROKEN:
                self._give_up(f"{self.members[at]} ended; {what}")
        for at in late:
            if gone[at] == _BROKEN:
                self._give_up(self._reason(at), f", as {self.members[at]} found")
            if gone[at]:
                self._give_up(f"{self.members[at]} left; {what}")
        if waited > self._deadline and late:
            # Others may be late because they wait for it too: it is the one furthest behind.
            last = self.members[min(late, key=self._progress)]
            self._give_up(f"{last} did not come within {self._deadline:g} s; {what}")

    def _progress(self, at: int) -> int:
        return sum(self._words[self._all[column][at]] for column in _COUNTED)

    def _give_up(self, reason: str, source: str = "") -> NoReturn:
        error = PeerError(reason + source)
        self.fail(error, reason)
        raise error

    def _reason(self, at: int) -> str:
        start = at * PAGE + _REASON
        return bytes(self._bytes[start : start + _LENGTH]).rstrip(b"\0").decode(errors="ignore")

    def fail(self, error: PeerError, reason: str | None = None) -> None:
        """From now on all calls raise this, and the others need not wait for this member.

        They tell the reason as theirs: who broke down because of another is not whom to look for.
        """
        if self._error is None:
            self._error = error
            text = (reason or str(error)).encode()[:_LENGTH]
            start = self.index * PAGE + _REASON
            self._bytes[start : start + len(text)] = text
            self.post(LEFT, _BROKEN)

    def close(self) -> None:
        """Tell the others that this member will not come again."""
        if self._bytes.nbytes:
            if self._error is None:
                self._error = PeerError("this member has left its collective")
                self.post(LEFT, _CLOSED)
            self._words.release()
            self._numbers.release()
            self._bytes = memoryview(b"")
