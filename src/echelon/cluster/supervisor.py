"""Run the processes of one machine: start them, watch them, and end them together.

`launch` forks the members (and starts coordinator and servers, if any) and returns the run's
summary or raises the one error that explains the failure. A supervisor watches meanwhile. It works
in one thread and waits for three kinds of events: lines from members (facts, results, errors), ends
of processes, and signals. Members that need each other all end when one fails (`Supervisor`):

a member fails ─▶ 1 s for the others to notice ─▶ SIGTERM ─▶ 1.5 s ─▶ SIGKILL
first Ctrl-C, SIGTERM or SIGHUP ─▶ forwarded: members stop at the same step, with a checkpoint
second ─▶ forwarded: members stop at once ─▶ 2 s ─▶ SIGKILL        third ─▶ SIGKILL
Ctrl-Z ─▶ members are stopped, then the supervisor stops itself ─▶ fg or bg ─▶ all continue
member 0 is done ─▶ the others have the deadline ─▶ SIGTERM ─▶ 1.5 s ─▶ SIGKILL

Members of an elastic run can do without each other (`LenientSupervisor`):

a member is killed ─▶ the others continue; the coordinator forms a new generation
a member raises an error of its own ─▶ all end and one error says why, as with `Supervisor`
the coordinator or a parameter server ends ─▶ it is started again
all members are killed ─▶ members that joined continue until the coordinator ends the run
the leader or the coordinator reports the end ─▶ 2 s for the others ─▶ SIGTERM ─▶ 1.5 s ─▶ SIGKILL
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from echelon.cluster.elastic_group import RunEnded
from echelon.cluster.environment import FORWARDED, SUSPEND, caught, make_forkable, suspend
from echelon.cluster.health import Beat, End, Fault, Pulses, named, verdict
from echelon.cluster.services import Fleet, Keeper, Seat, describe_exit
from echelon.cluster.workers import Child, Crew, Relay, Work
from echelon.core.errors import UserError
from echelon.core.format import warn
from echelon.loop.interrupt import SAME_SECONDS

NOTICE_SECONDS = 1.0
"""For the other members to report their own view of a failure, which may name its cause."""
TERM_SECONDS = 1.5
"""From SIGTERM to SIGKILL."""
IMPATIENT_SECONDS = 2.0
"""From the second request to stop to SIGKILL."""
_KILLED_SECONDS = 2.0
"""From SIGKILL until a process that is still there counts as stuck in the kernel."""
_LINGER_SECONDS = 2.0
"""For the other members to end once the run has succeeded."""
_NEWS_SECONDS = 15.0
"""For all members to learn of the run's end, once one of them has reported it."""
_HEARD_SECONDS = 0.5
"""After a pause: for members to be heard before the coordinator looks for silent ones."""
_LOOK_SECONDS = 0.25
"""Between two checks for stopped servers."""
_CHUNK = 1 << 16


def launch(
    count: int,
    work: Work,
    *,
    deadline: float,
    keeper: Keeper | None = None,
    fleet: Fleet | None = None,
) -> dict[str, Any]:
    """Run `work` in `count` forked processes; return what member 0's call returned.

    The processes are forked from this one, so modules and data loaded before are shared. If a
    member fails all end, and one error is raised: the member's own if it is an `EchelonError`,
    otherwise `MemberFailed`. `Interrupted` means that Ctrl-C or SIGTERM ended the members before
    they were done; a run that stops in an orderly way when asked to returns its result. `deadline`
    is how many seconds a member may wait for another one.

    With a `keeper` (of the coordinator; `fleet` manages servers) the run outlives lost members, and
    the result is that of the member that led at the end.
    """
    if count < 1:
        raise UserError(f"workers = {count}: at least one process has to do the work")
    make_forkable()
    if keeper is not None:
        keeper.start(lambda: None)  # before there are any descriptors of members to close in it
    if fleet is not None:
        fleet.start(lambda: None)
    with (
        closing(Pulses(count)) as pulses,
        caught() as signals,
        closing(Crew(count, besides=signals)) as crew,
    ):
        crew.start(work, pulses, deadline)
        supervisor: Supervisor
        if keeper is None:
            supervisor = Supervisor(crew, pulses, signals.reader, deadline)
        else:
            keeper.serve_store()
            supervisor = LenientSupervisor(crew, pulses, signals.reader, deadline, keeper, fleet)
        supervisor.watch()
    error = supervisor.verdict()
    if error is None:
        return supervisor.result
    vars(error)["facts"] = supervisor.facts
    vars(error)["steps"] = supervisor.steps
    raise error


def facts_of(error: BaseException) -> Mapping[str, Any]:
    """Return the facts that members had sent (`Member.tell`) before `launch` raised this error."""
    found: Mapping[str, Any] = vars(error).get("facts", {})
    return found


def steps_of(error: BaseException) -> int:
    """Return how many updates were made before `launch` raised this error."""
    found: int = vars(error).get("steps", 0)
    return found


class Supervisor:
    """Watches members that need each other: if one fails, all end.

    `seen` holds each member's last heartbeat, with its age in seconds, at the first failure.
    """

    def __init__(self, crew: Crew, pulses: Pulses, signals: int, deadline: float) -> None:
        self.facts: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self.forwarded: list[int] = []
        self.ends: list[End] = []
        self.seen: dict[int, tuple[Beat, float]] = {}
        self._crew = crew
        self._pulses = pulses
        self._signals = signals
        self._deadline = deadline
        self._last = (0, 0.0)
        """The last signal, and when it came."""
        self._relay = Relay(crew.pipes.texts)
        self._partial = dict.fromkeys(range(crew.count), b"")
        self._finished: set[int] = set()
        self._faults: dict[int, Fault] = {}
        self._arrivals: dict[int, int] = {}
        """Member → position in the order in which failures and ends were noticed."""
        self._plan: list[tuple[float, int]] = []
        """(moment, signal): what the members still alive at that moment will be sent."""

    def watch(self) -> None:
        """Handle events until every member has ended."""
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._signals, selectors.EVENT_READ, self._forward)
            for child in self._crew.children:
                self._register(self._crew.pipes.reports[child.index], self._hear, child)
                self._register(child.handle, self._reap, child)
            self._watch_more()
            while self._goes_on() and self._act():
                for key, _ in selector.select(self._patience()):
                    if key.fd in selector.get_map():  # else unregistered earlier in this round
                        key.data()
            for child in self._crew.alive:
                warn(f"pid {child.pid} could not be ended")
                self._note(child)
        self._relay.finish()

    def _goes_on(self) -> bool:
        """Return whether there is anything left to watch."""
        return bool(self._crew.alive)

    def _watch_more(self) -> None:
        """Register further processes to watch. For subclasses."""

    def _register(self, descriptor: int, call: Callable[..., None], *arguments: Any) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: call(*arguments))

    def _patience(self) -> float | None:
        return max(0.0, self._plan[0][0] - time.monotonic()) if self._plan else None

    def _act(self) -> bool:
        """Send the signals that are due; return whether to go on waiting."""
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            if number == 0:  # not even SIGKILL ended them: they hang in the kernel
                return False
            self._crew.signal(number)
        return True

    def _end_by(self, *steps: tuple[float, int]) -> None:
        """Plan (seconds from now, signal) steps; a plan that ends sooner stays."""
        now = time.monotonic()
        plan = [(now + seconds, number) for seconds, number in steps]
        plan.append((plan[-1][0] + _KILLED_SECONDS, 0))
        if not self._plan or plan[-1][0] < self._plan[-1][0]:
            self._plan = plan

    def _hear(self, child: Child) -> None:
        """Read what a member sent, line by line."""
        descriptor = self._crew.pipes.reports[child.index]
        while chunk := _read(descriptor):
            *lines, rest = (self._partial[child.index] + chunk).split(b"\n")
            self._partial[child.index] = rest
            for line in lines:
                self._take(child, json.loads(line))
        if chunk == b"" and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        if "told" in message:
            self.facts |= message["told"]
        elif "result" in message:
            self._finished.add(child.index)
            if child.index == 0:
                self.result = message["result"]
        else:
            fault = self._faults[child.index] = Fault(**message["error"])
            self._arrivals.setdefault(child.index, len(self._arrivals))
            self._raised(fault)

    def _raised(self, _fault: Fault) -> None:
        """React to an error that a member reported."""
        self._failed()

    def _failed(self) -> None:
        """Note every member's last heartbeat once, and end all members soon."""
        if not self.seen:
            now = time.monotonic()
            beats = {child.index: self._pulses.read(child.index) for child in self._crew.children}
            self.seen = {index: (beat, now - beat.moment) for index, beat in beats.items()}
        self._end_by(
            (NOTICE_SECONDS, signal.SIGTERM), (NOTICE_SECONDS + TERM_SECONDS, signal.SIGKILL)
        )

    def _reap(self, child: Child) -> None:
        self._hear(child)  # the last lines it wrote may not have been read yet
        self._selector.unregister(child.handle)
        child.reap()
        self._note(child)

    def _note(self, child: Child) -> None:
        """Record how a member ended, and react to it."""
        end = End(
            index=child.index,
            pid=child.pid,
            order=self._arrivals.setdefault(child.index, len(self._arrivals)),
            status=-signal.SIGKILL if child.status is None else child.status,
            beat=self._pulses.read(child.index),
            fault=self._faults.get(child.index),
            finished=child.index in self._finished,
            sent=child.sent,
        )
        self.ends.append(end)
        self._missed(end)
        if child.index == 0:
            self._outlive(end)

    def _missed(self, end: End) -> None:
        """React to a member's end. Without a result the others lack a peer, whatever ended it."""
        if not end.finished:
            self._failed()
        if not end.failed and not end.finished and 0 in self._finished and not self.forwarded:
            who = named(end.index, self._crew.count, end.pid)
            warn(f"{who} did not end within {self._deadline:g} s of member 0 and was ended")

    def _outlive(self, first: End) -> None:
        """Member 0 has ended: print the others' output in its place and limit how long they run."""
        for descriptor in self._relay.sources:
            self._register(descriptor, self._print, descriptor)
        if first.finished:
            self._end_by(
                (self._deadline, signal.SIGTERM), (self._deadline + TERM_SECONDS, signal.SIGKILL)
            )

    def _print(self, descriptor: int) -> None:
        if not self._relay.read(descriptor):
            self._selector.unregister(descriptor)

    def _forward(self) -> None:
        """Pass each request to stop on to every member, once."""
        came = os.read(self._signals, _CHUNK)
        if SUSPEND in came:
            self._suspend()
        for number in filter(FORWARDED.__contains__, came):
            last, self._last = self._last, (number, time.monotonic())
            # `timeout` and torchrun signal a process and its group: one request that arrives twice.
            if number == last[0] and self._last[1] - last[1] < SAME_SECONDS:
                continue
            self.forwarded.append(number)
            if len(self.forwarded) > 2:
                self._end_by((0.0, signal.SIGKILL))
                continue
            self._crew.signal(number)
            if len(self.forwarded) == 2:
                self._end_by((IMPATIENT_SECONDS, signal.SIGKILL))

    def _suspend(self) -> None:
        """Stop the members and this process, as Ctrl-Z would; continue all when resumed.

        The terminal itself stops only its foreground group, which the members are not in.
        """
        self._crew.signal_groups(signal.SIGSTOP)
        began = time.monotonic()
        suspend()
        stopped = time.monotonic() - began
        self._plan = [(moment + stopped, number) for moment, number in self._plan]
        self._crew.signal_groups(signal.SIGCONT)

    def verdict(self) -> BaseException | None:
        """Return the one error to raise once all have ended, or None if all went well."""
        return verdict(self.ends, self.seen, self.forwarded)

    @property
    def steps(self) -> int:
        """Updates that were made; a heartbeat carries the number of the one under way."""
        return max((end.beat.step or 1) - 1 for end in self.ends)


def _read(descriptor: int) -> bytes | None:
    """Return the available bytes: empty at the pipe's end, None if there are none at present."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None


class LenientSupervisor(Supervisor):
    """Watches members that can do without each other, their coordinator, and servers if any."""

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

    def _goes_on(self) -> bool:
        """Return whether anything is left to watch.

        When all members of this machine are killed, members that joined from elsewhere continue;
        then this watches until the coordinator has ended.
        """
        if self._crew.alive:
            return True
        raised = any(end.fault and end.fault.kind != RunEnded.__name__ for end in self.ends)
        if self.result or raised or self._over or self.forwarded:
            return False
        if not self._left_alone:
            self._left_alone = True
            self._keeper.leave_alone()
        return True

    def _replace(self) -> None:
        """Start another coordinator, unless it has ended because the run is over."""
        self._selector.unregister(self._keeper.handle)
        status = self._keeper.reap()
        self._over = status == 0
        if self._over:
            self._be_done()
        if self._over or self.result:
            return
        warn(f"the coordinator ended ({describe_exit(status)}); another one takes over")
        self._keeper.start(self._crew.pipes.close)
        self._register(self._keeper.handle, self._replace)

    def _be_done(self) -> None:
        """Limit how long members still run, because the coordinator says that the run is over."""
        self._keeper.shut()
        done = self._keeper.ending() in ("done", "stopped")
        patience = _LINGER_SECONDS if done else _NEWS_SECONDS
        self._end_by((patience, signal.SIGTERM), (patience + TERM_SECONDS, signal.SIGKILL))

    def _replace_server(self, seat: Seat) -> None:
        assert self._fleet is not None
        self._selector.unregister(seat.handle)
        warn(self._fleet.replace(seat, self._crew.pipes.close))
        self._register(seat.handle, self._replace_server, seat)

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        known = self.result
        super()._take(child, message)
        self.result = known
        found = message.get("result", {})
        if found and (found["led"] or not known):
            self.result = found

    def _raised(self, fault: Fault) -> None:
        """React to a reported error. `RunEnded` is no failure: give the others time to finish."""
        if fault.kind != RunEnded.__name__:
            self._failed()
        else:
            self._end_by((_NEWS_SECONDS, signal.SIGTERM), (_NEWS_SECONDS + 1, signal.SIGKILL))

    def _missed(self, end: End) -> None:
        """React to a member's end: only a reported error concerns the others, not a kill."""
        if end.fault is not None:
            self._raised(end.fault)
        if end.finished and self.result.get("led"):
            self._end_by(
                (_LINGER_SECONDS, signal.SIGTERM),
                (_LINGER_SECONDS + TERM_SECONDS, signal.SIGKILL),
            )

    def _suspend(self) -> None:
        """Stop and continue coordinator and servers, too.

        A coordinator that kept running would declare all members lost. It is continued last, after
        a moment in which members' heartbeats arrive.
        """
        self._keeper.signal(signal.SIGSTOP)
        if self._fleet is not None:
            self._fleet.signal(signal.SIGSTOP)
        super()._suspend()
        if self._fleet is not None:
            self._fleet.signal(signal.SIGCONT)
        time.sleep(_HEARD_SECONDS)
        self._keeper.signal(signal.SIGCONT)

    def verdict(self) -> BaseException | None:
        """Return the error to raise, or None. Members that raised an error are judged first.

        A member that was killed is no failure of the run as long as others could continue.
        """
        if self.result or self._keeper.ending() in ("done", "stopped"):
            return None
        raised = [end for end in self.ends if end.fault is not None and not end.fault.follow_on]
        own = [end for end in raised if end.fault and end.fault.kind != RunEnded.__name__]
        failed = [end for end in self.ends if end.failed]
        # Of members that failed without raising, only the last counts: until then others continued.
        judged = own or raised or failed[-1:] or self.ends
        return verdict(judged, self.seen, self.forwarded, self._crew.count)
