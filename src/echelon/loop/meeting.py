"""Points where members that update servers independently come together.

    a request, or no samples left to lease ─▶ stop pushing ─▶ all are here: one version for all
    ─▶ what is due: evaluate, checkpoint, stop, regroup ─▶ each member continues on its own

`open_ledger` starts a generation in the same way, and `count_up` collects metrics at the end.
"""

from __future__ import annotations

from typing import cast

from echelon.core.interfaces import RemoteStrategy
from echelon.core.types import Ask
from echelon.loop.leased_ledger import SharedLedger
from echelon.loop.run import Run


def meet(run: Run) -> str | None:
    """Bring all members to one version and do what is due; return the reason to stop, or None."""
    strategy, ledger = cast(RemoteStrategy, run.strategy), cast(SharedLedger, run.ledger)
    strategy.rest()
    asked = run.fellows.sum(_once(run.heard | run.comm.asked))
    found = strategy.pull()
    ledger.meet()
    run.meter.samples = ledger.consumed()
    [run.version] = run.fellows.led(found)  # no member pushes again before all have pulled
    run.agreed(asked)
    return _attend(run)


def open_ledger(run: Run) -> None:
    """Open the shared ledger in a new generation, and repeat what was due when a member was lost.

    Called by all members before any of them continues on its own.
    """
    strategy, ledger = cast(RemoteStrategy, run.strategy), cast(SharedLedger, run.ledger)
    [run.version] = run.fellows.led(strategy.pull())
    ledger.open(run.version)
    run.heard = 0
    run.fellows.barrier()
    _attend(run)


def _attend(run: Run) -> str | None:
    reason = run.attend()
    run.met_at = run.version
    return reason


def _once(asked: int) -> int:
    """Return every request in `asked` once, however often it was added."""
    wishes = (Ask.TIME, Ask.REGROUP, Ask.SIGNAL)
    return sum(int(wish) for wish in wishes if wish.among(asked))


def count_up(run: Run) -> None:
    """Collect the metrics of every trainer and every server. Called by all members at the end."""
    mine = cast(RemoteStrategy, run.strategy).figures()
    shards = [key for key in mine if key.startswith("shard_")]
    own = {key: value for key, value in mine.items() if key not in shards}
    servers: dict[str, dict[str, float]] = {}
    for key in shards:
        _, shard, name = key.split("_", 2)
        if name in _JUDGED:
            own[_JUDGED[name]] = mine[key]
        elif not name.startswith(("gate_", "member_")):  # trainers report these themselves
            servers.setdefault(shard, {})[name] = mine[key]
    trainers = run.fellows.told(own)
    run.nodes = {"trainers": {str(at): one for at, one in enumerate(trainers)}, "servers": servers}


_JUDGED = {"gate_merit": "merit", "gate_rejected": "rejected"}
"""Metrics of a trainer that only the server's gate knows: its name for them → ours."""
