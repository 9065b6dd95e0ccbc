"""A member's side of its conversation with the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.cluster.coordinator.backlog import Backlog, Item
from echelon.cluster.coordinator.conversation import Conversation
from echelon.cluster.coordinator.generation import About, Generation
from echelon.cluster.coordinator.messages import one_line
from echelon.cluster.coordinator.standing import Standing
from echelon.core.types import Lease

_LEAVE = 10.0
"""Seconds to be heard in when leaving."""


class Liaison:
    """Gives signs of life, brings orders, and keeps what was reported until it is on record.

    Its thread calls back: `regroup(why, urgent)` when the generation is to be left, `notice(text)`
    with something for people to read, `ended(why)` once, when the run is over or the coordinator
    could not be reached for `deadline` seconds. A connection that breaks is made anew meanwhile,
    and training goes on undisturbed. To be made in the process that it speaks for.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        about: About,
        *,
        regroup: Callable[[str, bool], None],
        notice: Callable[[str], None],
        ended: Callable[[str], None],
        deadline: float,
    ) -> None:
        self._deadline = deadline
        self._backlog = Backlog()
        self._standing = Standing(about, self._backlog, regroup, notice, ended)
        self._talk = Conversation(address, key, deadline, self._backlog, self._standing)
        self._standing.stop = self._talk.stop
        self._talk.start()

    @property
    def member(self) -> int:
        """This member's id; another one after it was expelled, -1 while it is between the two."""
        member = self._standing.member
        return -1 if member is None else member

    @property
    def run(self) -> Mapping[str, Any]:
        """What whoever started the run wants its members to know."""
        return self._standing.run

    @property
    def pace(self) -> float | None:
        """Seconds per sample, as told with every beat."""
        return self._standing.pace

    @pace.setter
    def pace(self, seconds: float | None) -> None:
        self._standing.pace = seconds

    def pulse(self, step: int, doing: str) -> None:
        """Where this member is; told with the next beat."""
        standing = self._standing
        standing.step = step
        standing.doing = doing

    def arrive(
        self, generation: int, progress: Sequence[int], why: str, suspect: int | None = None
    ) -> Generation:
        """Leave `generation` (0: a newcomer) and wait for the next one with this member in it.

        A member that was expelled arrives as a newcomer, whatever it says.
        """
        standing = self._standing
        with standing.turn:
            standing.formed = None
            standing.arrival = {
                "generation": generation if standing.generation else 0,
                "progress": [int(made) for made in progress],
                "why": one_line(why),
                "suspect": suspect,
            }
            self._talk.wake()
            standing.wait_for(lambda: standing.formed is not None, self._deadline)
            assert standing.formed is not None
            return standing.formed

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """Updates that were made: (epoch, start, stop, first, last) each, in order.

        Every member reports. The leader's are sent; the others' when they leave their generation,
        in case the leader is lost.
        """
        standing = self._standing
        if standing.generation and records:
            self._backlog.report(standing.generation, records)
            if standing.leads:
                self._talk.wake()

    @property
    def is_heard(self) -> bool:
        """Whether what is reported may still come to be on record."""
        return self._standing.end is None

    @property
    def leads(self) -> bool:
        return self._standing.leads

    @property
    def recorded(self) -> int | None:
        """The last version known to be on record; None for one that does not lead."""
        return self._standing.recorded if self._standing.leads else None

    def shares(self, version: int, shares: Sequence[float]) -> None:
        """From this version on batches are split like that; only the leader's word counts."""
        if self._standing.leads:
            generation, values = self._standing.generation, [float(share) for share in shares]
            self._post("shares", generation=generation, version=version, shares=values)

    def told(self, text: str) -> None:
        """Something for the journal."""
        self._post("told", text=one_line(text))

    def rolled_back(self, version: int, why: str) -> None:
        """All go on from this version: every member says so, the leader's word is sent."""
        self._standing.recorded = version
        if self._standing.leads:
            self._post("rolled_back", version=version, why=one_line(why))
        else:
            self._backlog.forget_records()

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None:
        """Say what is consumed; all leases are void when this returns. Only the leader's word
        counts."""
        if not self._standing.leads:
            return
        standing, item = self._standing, self._post("ledger", version=version, ledger=dict(ledger))
        with standing.turn:
            standing.wait_for(lambda: not self._backlog.holds(item), self._deadline)

    def lease(
        self, epoch: int, wanted: int, unit: int = 1, used: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[Lease], int]:
        """Hold about `wanted` samples of an epoch in all, more if this member is fast.

        Returns everything held, what was before too, and how many samples of the epoch are not
        committed: while there are any, others may still give theirs back. `used`: what this member
        held and is done with; what is handed out is a multiple of `unit`.
        """
        standing = self._standing
        done = [list(pair) for pair in used]
        item = self._post("lease", epoch=epoch, wanted=wanted, unit=unit, used=done)
        with standing.turn:
            standing.wait_for(lambda: self._answered(item), self._deadline)
            answer = standing.answers.pop(item.seq or 0, None)
        if answer is None:
            return [], 1  # expelled meanwhile: this member holds nothing
        return [Lease(epoch, start, stop) for start, stop in answer["ranges"]], answer["left"]

    def commit(self, lease: Lease, version: int) -> None:
        """The update to `version` consumed this lease, or a part of one."""
        epoch, start, stop = lease
        self._post("commit", epoch=epoch, start=start, stop=stop, version=version)

    def give_back(self, lease: Lease) -> None:
        epoch, start, stop = lease
        self._post("give_back", epoch=epoch, start=start, stop=stop)

    def leave(self, why: str, fatal: bool = False, over: bool = False) -> None:
        """End for good, once all that was reported is on record.

        `fatal`: the run ends for all, with this as its reason. `over`: training is over for all,
        `why` is its status, and whoever leaves is not missed. Otherwise the others go on without.
        """
        standing = self._standing
        with standing.turn:
            fatal = fatal and standing.ending is None  # or it follows from what ended the run
            if standing.end is None and standing.last is None:
                item = Item("leave", {"why": one_line(why), "fatal": fatal, "over": over})
                standing.last = self._backlog.put(item)
                self._talk.wake()
                until = time.monotonic() + min(_LEAVE, self._deadline)
                while (
                    self._backlog.holds(item) and standing.end is None and time.monotonic() < until
                ):
                    standing.turn.wait(0.05)
        self._talk.stop()

    def close(self) -> None:
        """End the thread and the connection; without a `leave` this member counts as lost."""
        with self._standing.turn:
            self._standing.end = self._standing.end or "this member has closed its liaison"
            self._standing.turn.notify_all()
        self._talk.close()

    def _answered(self, item: Item) -> bool:
        return item.seq in self._standing.answers or not self._backlog.holds(item)

    def _post(self, kind: str, **fields: Any) -> Item:
        item = self._backlog.put(Item(kind, fields))
        self._talk.wake()
        return item
