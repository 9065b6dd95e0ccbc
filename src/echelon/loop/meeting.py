"""Members that make updates each for itself come together now and then.

asked to, or nothing left to hold ─▶ rest ─▶ all are here: nobody pushes ─▶ one version for all
─▶ what is due: evaluate, checkpoint, stop, regroup ─▶ each goes its own way again
"""

from __future__ import annotations

from typing import cast

from echelon.core.interfaces import RemoteStrategy
from echelon.core.types import Ask
from echelon.loop.run import Run
from echelon.loop.shared_ledger import SharedLedger


def meet(run: Run) -> str | None:
    """Be at one version with all others; returns why to stop, if so."""
    strategy, ledger = cast(RemoteStrategy, run.strategy), cast(SharedLedger, run.ledger)
    strategy.rest()
    asked = run.fellows.sum(_once(run.heard | run.comm.asked))
    found = strategy.pull()
    ledger.meet()
    run.meter.samples = ledger.consumed()
    [run.version] = run.fellows.led(found)  # and nobody goes on before all have looked
    run.agreed(asked)
    return _attend(run)


def open_ledger(run: Run) -> None:
    """In a new generation, before anybody goes its own way; what was due and broken off is done."""
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
    """Each wish one time, however often it was added up."""
    wishes = (Ask.TIME, Ask.REGROUP, Ask.SIGNAL)
    return sum(int(wish) for wish in wishes if wish.among(asked))
