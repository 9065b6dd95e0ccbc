"""Members whose weights live on servers go on from where the servers are.

the servers are ahead    an update was made of which nobody heard: its samples are consumed
the servers lost a part  all go back to the last checkpoint, and bring its state to the servers
the record is ahead      they went back, and whoever was to say so was lost before it was heard
the record is behind     whoever knew what the last updates were made of was lost before it was
                         heard, and all go back to the last checkpoint
"""

from __future__ import annotations

from typing import cast

from echelon.comm.group import Group
from echelon.core.errors import TrainingError
from echelon.core.interfaces import RemoteStrategy
from echelon.core.types import Lease
from echelon.loop import heal
from echelon.loop.run import Run

_JUDGED = {"gate_merit": "merit", "gate_rejected": "rejected"}
"""What the gate knows of a trainer, and the trainer does not."""
_WHY = "a server was lost, and a part of the state with it"
_UNKNOWN = "whoever knew the samples of the last updates was lost"


def follow(run: Run, recorded: int) -> None:
    """Called by all of a new generation together, once nobody is behind the others; `recorded` is
    the version that the journal knows of."""
    servers = cast(RemoteStrategy, run.strategy)
    version = -1 if servers.lacks_state else servers.pull()
    unknown = not servers.apart and not _all_known(servers, run.version, version)
    # One may have gone back, another not yet.
    if run.fellows.sum(int(version < run.version or unknown)):
        _go_back(run, _UNKNOWN if unknown else _WHY)
        version = servers.pull()
    elif version < recorded:
        run.comm.rolled_back(version, _WHY)
    if servers.apart:  # each knows the version of its own last update: all are to do the same now
        run.version, run.met_at = run.fellows.led(version, run.met_at)
        return  # what is consumed is asked for before anybody goes on
    for epoch, start, stop, version, _ in servers.unheard(run.version):
        run.ledger.take_in(Lease(epoch, start, stop), version)
        run.version = version


def _all_known(servers: RemoteStrategy, heard: int, version: int) -> bool:
    """Whether the servers still know what all updates after `heard` were made of."""
    if version <= heard:
        return True
    found = {record[3] for record in servers.unheard(heard) if record[4] >= 0}
    return found.issuperset(range(heard + 1, version + 1))


def count_up(run: Run) -> None:
    """At the end: what every trainer and every server did, for all to know."""
    mine = cast(RemoteStrategy, run.strategy).figures()
    shards = [key for key in mine if key.startswith("shard_")]
    own = {key: value for key, value in mine.items() if key not in shards}
    servers: dict[str, dict[str, float]] = {}
    for key in shards:
        _, shard, name = key.split("_", 2)
        if name in _JUDGED:
            own[_JUDGED[name]] = mine[key]
        elif not name.startswith(("gate_", "member_")):  # of trainers, who count for themselves
            servers.setdefault(shard, {})[name] = mine[key]
    trainers = run.fellows.told(own)
    run.nodes = {"trainers": {str(at): one for at, one in enumerate(trainers)}, "servers": servers}


def _go_back(run: Run, why: str) -> None:
    """The first one reads the last checkpoint, and all go on from there."""
    before, first = run.version, run.comm.index == 0
    everybody = cast(Group, run.comm).collective()
    if first:
        run.writer.flush()
        if not run.shelf.versions():
            raise TrainingError("the servers lost the state of this run; there is no checkpoint")
        run.load(run.shelf.load("last"), healed=True)
        heal.send(everybody, run.cut(alone=True, healing=True))
    else:
        run.newcomer = True  # until all of it is here
        run.load(heal.receive(everybody), healed=True)
    run.comm.rolled_back(run.version, why)
    if first:
        run.notice(f"{why}: went back from step {before} to the checkpoint of step {run.version}")
