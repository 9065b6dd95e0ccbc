"""The processes of one run on one machine: started, watched over, and ended together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from echelon.cluster.child import Work
from echelon.cluster.crew import Crew
from echelon.cluster.fleet import Fleet
from echelon.cluster.forkable import make_forkable
from echelon.cluster.keeper import Keeper
from echelon.cluster.lenient import LenientSupervisor
from echelon.cluster.member import Member
from echelon.cluster.pulse import Pulses
from echelon.cluster.signals import caught
from echelon.cluster.supervisor import Supervisor
from echelon.cluster.verdict import Interrupted, MemberFailed
from echelon.core.errors import UserError

__all__ = ["Interrupted", "Member", "MemberFailed", "facts_of", "launch", "steps_of"]


def launch(
    count: int,
    work: Work,
    *,
    deadline: float,
    keeper: Keeper | None = None,
    fleet: Fleet | None = None,
) -> dict[str, Any]:
    """Run `work` in `count` processes of this machine; returns what member 0's gave back.

    The members are forked from here: what is loaded before is there once, and shared. If one
    fails all end, and one error says why: the member's own if it was an `EchelonError`, otherwise
    `MemberFailed`. `Interrupted` says that they were made to end by Ctrl-C or SIGTERM; a run that
    stopped by itself when it was asked to returns its result. `deadline` (seconds) is how long a
    member may wait for another one. With a `keeper` of a coordinator members are dispensable, and
    what comes back is of whoever led them at the end; a `fleet` of servers goes with it.
    """
    if count < 1:
        raise UserError(f"workers = {count}: at least one process has to do the work")
    make_forkable()
    if keeper is not None:
        keeper.start(lambda: None)  # first of all: it has nothing of the members' then
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
    """What the members had told before `launch` raised this error."""
    found: Mapping[str, Any] = vars(error).get("facts", {})
    return found


def steps_of(error: BaseException) -> int:
    """The updates that were made before `launch` raised this error."""
    found: int = vars(error).get("steps", 0)
    return found
