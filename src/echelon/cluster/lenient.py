"""A supervisor of members that can do without each other.

a member is killed ─▶ the others go on; the coordinator sees to it
a member raises an error of its own ─▶ as ever: all end, and one error says why
the coordinator or a parameter server ends ─▶ another one is started
all members are killed ─▶ whoever joined goes on; the run is over when the coordinator says so
whoever leads is done, or the coordinator says that all is ─▶ the others have 2 s ─▶ SIGTERM
─▶ 1.5 s ─▶ SIGKILL
"""

from __future__ import annotations

import signal
import time
from typing import Any

from echelon.cluster.crew import Child, Crew
from echelon.cluster.elastic_group import RunEnded
from echelon.cluster.fault import Fault
from echelon.cluster.fleet import Fleet, Seat
from echelon.cluster.keeper import Keeper
from echelon.cluster.pulse import Pulses
from echelon.cluster.supervisor import TERM_SECONDS, Supervisor
from echelon.cluster.verdict import End, verdict
from echelon.core.format import warn

_LINGER_SECONDS = 2.0
_NEWS_SECONDS = 15.0
"""For all to hear of the run's end, once one of them has."""
_HEARD_SECONDS = 0.5
_LOOK_SECONDS = 0.25
"""Between two looks at whether a server stands still."""


class LenientSupervisor(Supervisor):
    """Watches the coordinator too, and the servers if there are any."""

    def __init__(
        self,
        crew: Crew,
        pulses: Pulses,
        signals: int,
        deadline: float,
        keeper: Keeper,
        fleet: Fleet | None = None,
    ) -> None:
        super().__init__(crew, pulses, signals, deadline)
        self._keeper, self._fleet = keeper, fleet
        self._over = self._left_alone = False

    def verdict(self) -> BaseException | None:
        """Whoever was merely lost is not to blame for an error that another one raised."""
        if self.result or self._keeper.ending() in ("done", "stopped"):
            return None
        raised = [end for end in self.ends if end.fault is not None and not end.fault.follow_on]
        own = [end for end in raised if end.fault and end.fault.kind != RunEnded.__name__]
        failed = [end for end in self.ends if end.failed]
        judged = own or raised or failed[-1:] or self.ends  # before the last one, others went on
        return verdict(judged, self.seen, self.forwarded, self._crew.count)

    def _goes_on(self) -> bool:
        """Whoever joined from elsewhere goes on without us; the coordinator knows until when."""
        if self._crew.alive:
            return True
        raised = any(end.fault and end.fault.kind != RunEnded.__name__ for end in self.ends)
        if self.result or raised or self._over or self.forwarded:
            return False
        if not self._left_alone:
            self._left_alone = True
            self._keeper.leave_alone()
        return True

    def _watch_more(self) -> None:
        self._register(self._keeper.handle, self._replace)
        for seat in self._fleet.seats if self._fleet else ():
            self._register(seat.handle, self._replace_server, seat)

    def _patience(self) -> float | None:
        patience = super()._patience()
        if self._fleet is None:
            return patience
        return _LOOK_SECONDS if patience is None else min(patience, _LOOK_SECONDS)

    def _act(self) -> bool:
        for said in self._fleet.end_frozen() if self._fleet else ():
            warn(said)
        return super()._act()

    def _replace_server(self, seat: Seat) -> None:
        assert self._fleet is not None
        self._selector.unregister(seat.handle)
        warn(self._fleet.replace(seat, self._crew.pipes.close))
        self._register(seat.handle, self._replace_server, seat)

    def _replace(self) -> None:
        """The coordinator has ended, and not because it was told to."""
        self._selector.unregister(self._keeper.handle)
        status = self._keeper.reap()
        self._over = status == 0
        if self._over:
            self._be_done()
        if self._over or self.result:
            return
        warn(f"the coordinator ended ({_how(status)}); another one takes over")
        self._keeper.start(self._crew.pipes.close)
        self._register(self._keeper.handle, self._replace)

    def _be_done(self) -> None:
        """Whoever is still there was given up, and need not know that it was."""
        self._keeper.shut()
        done = self._keeper.ending() in ("done", "stopped")
        patience = _LINGER_SECONDS if done else _NEWS_SECONDS
        self._end_by((patience, signal.SIGTERM), (patience + TERM_SECONDS, signal.SIGKILL))

    def _suspend(self) -> None:
        """The coordinator stops too, or it would give up on all; it hears members before it looks
        for who was silent."""
        self._keeper.signal(signal.SIGSTOP)
        if self._fleet is not None:
            self._fleet.signal(signal.SIGSTOP)
        super()._suspend()
        if self._fleet is not None:
            self._fleet.signal(signal.SIGCONT)
        time.sleep(_HEARD_SECONDS)
        self._keeper.signal(signal.SIGCONT)

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        known = self.result
        super()._take(child, message)
        self.result = known
        found = message.get("result", {})
        if found and (found["led"] or not known):
            self.result = found

    def _raised(self, fault: Fault) -> None:
        """Whoever only hears that the run has ended, be it done, is no reason to end the others."""
        if fault.kind != RunEnded.__name__:
            self._failed()
        else:
            self._end_by((_NEWS_SECONDS, signal.SIGTERM), (_NEWS_SECONDS + 1, signal.SIGKILL))

    def _missed(self, end: End) -> None:
        """Only an error that was raised is everybody's."""
        if end.fault is not None:
            self._raised(end.fault)
        if end.finished and self.result.get("led"):
            self._end_by(
                (_LINGER_SECONDS, signal.SIGTERM),
                (_LINGER_SECONDS + TERM_SECONDS, signal.SIGKILL),
            )


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
