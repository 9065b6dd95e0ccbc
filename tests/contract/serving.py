"""Servers for trainers in tests: real processes, as a run's supervisor starts them."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.cluster.environment import _end_kernel_threads
from echelon.cluster.services import Fleet
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.comm.group import Group
from echelon.comm.peers import Place
from echelon.comm.ps.messages import Directory, ShardAddress
from echelon.core.config import job_from
from echelon.core.interfaces import Strategy

DEADLINE = 10.0
_KEY = secrets.token_bytes(32)
_OPEN: list[Fleet] = []
_NUMBERS = itertools.count(1)
CONNECTED: list[Strategy] = []
"""Strategies that have to hang up before their servers end."""


class Served(Group):
    """A group whose members know where the servers are."""

    shards: tuple[ShardAddress, ...] = ()
    others: list[tuple[ShardAddress, ...]]
    """More of them, for one training each."""
    generation = 1

    def next(self) -> None:
        """Go on with fresh servers."""
        self.shards = self.others.pop(0)

    def directory(self) -> Directory:
        return Directory(
            shards=self.shards,
            key=_KEY,
            member=self.index,
            generation=self.generation,
            members=tuple(range(self.count)),
            deadline=DEADLINE,
            halted=lambda: None,
        )


def start(servers: int = 1, **section: Any) -> Fleet:
    """Fresh ones; `end_all` ends them."""
    _end_kernel_threads()  # those of a connection to other servers may go on
    job = job_from(
        {"strategy": "parameter_server", "parameter_server": {"servers": servers, **section}}
    )
    fleet = Fleet(job, _KEY, Path(f"servers-{os.getpid()}-{next(_NUMBERS)}") / "journal")
    fleet._file.parent.mkdir()
    _OPEN.append(fleet)
    fleet.start(lambda: None)
    return fleet


def close_all() -> None:
    while CONNECTED:
        CONNECTED.pop().let_go()


def end_all() -> None:
    while _OPEN:
        _OPEN.pop().close()


def run(
    count: int, servers: int, work: Callable[[Served], Any], *, times: int = 1, **section: Any
) -> Any:
    """As `members.run`, with as many sets of servers as there are trainings."""
    fleets = [start(servers, **section).addresses for _ in range(times)]

    def body(member: Member) -> dict[str, Any]:
        torch.set_num_threads(1)
        group = Served(member.place)
        group.others, group.shards = list(fleets), fleets[0]
        group.pulse = member.pulse
        try:
            return {"found": work(group)}
        finally:
            close_all()
            group.close()

    return launch(count, body, deadline=DEADLINE)["found"]


def alone(servers: int = 1, **section: Any) -> Served:
    """A group of one, with servers of its own."""
    group = Served(Place(0, 1))
    group.shards = start(servers, **section).addresses
    return group
