"""Servers for trainers in tests: real processes, as a run's supervisor starts them."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.cluster.fleet import Fleet
from echelon.cluster.forkable import _end_kernel_threads
from echelon.comm.group import Group
from echelon.comm.place import Place
from echelon.comm.servers.address import ShardAddress
from echelon.comm.servers.directory import Directory
from echelon.core.config import job_from

DEADLINE = 10.0
_KEY = secrets.token_bytes(32)
_OPEN: list[Fleet] = []
_NUMBERS = itertools.count(1)


class Served(Group):
    """A group whose members know where the servers are."""

    shards: tuple[ShardAddress, ...] = ()
    generation = 1

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


def end_all() -> None:
    while _OPEN:
        _OPEN.pop().close()


@contextmanager
def served(servers: int = 1, **section: Any) -> Iterator[Fleet]:
    fleet = start(servers, **section)
    try:
        yield fleet
    finally:
        _OPEN.remove(fleet)
        fleet.close()


def alone(servers: int = 1, **section: Any) -> Served:
    """A group of one, with servers of its own."""
    group = Served(Place(0, 1))
    group.shards = start(servers, **section).addresses
    return group
