"""The proof of a run: from its journal, and checked against its newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.checkpoint import Shelf
from echelon.core.errors import DataError, RunError, TrainingError
from echelon.core.types import Lease
from echelon.data.intervals import Intervals
from echelon.data.journal import JOURNAL
from echelon.data.proof import Account, Replay, account, replay
from echelon.loop.assemble import CHECKPOINTS


class ProofError(TrainingError):
    """Not every sample counted exactly once, or it cannot be shown."""


def audit(folder: Path, *, checkpoint: bool) -> Account:
    """What the journal of the run in `folder` comes to."""
    path = folder / JOURNAL
    if not path.exists():
        raise RunError(
            f"run {folder.name!r} has no journal: it was made before there were any "
            f"(if it is resumed, its proof begins there)"
        )
    # First the checkpoint: whatever it holds was in the journal before, also in a live run.
    cut = _newest(folder) if checkpoint else None
    found = replay(path)
    if not found.samples:
        raise DataError(f"{path}: the journal has no beginning: it is empty, or was cut off")
    proof = account(found)
    if cut is not None:
        proof.problems += _differences(found, cut)
    return proof


def require_exact(proof: Account) -> None:
    """Raise what is wrong, in one line."""
    if proof.problems:
        first, *others = proof.problems
        more = f" (and {len(others)} more)" if others else ""
        raise ProofError(f"run {proof.run!r} is not exactly once: {first}{more}")


def _newest(folder: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint, if there is one."""
    try:
        return Shelf(folder / CHECKPOINTS).load("last")
    except RunError:
        return None


def _differences(found: Replay, cut: dict[str, Any]) -> Iterator[str]:
    """What the ledger of a checkpoint and the journal do not agree about."""
    version = cut["strategy"]["version"]
    if version > found.version:
        yield f"the checkpoint of step {version:,} is newer than the journal's {found.version:,}"
        return
    told = found.positions(version, [Lease(*lease) for lease in cut["loop"]["left_out"]])
    kept = _consumed(cut["ledger"])
    for epoch in sorted(told.keys() | kept.keys()):
        mine, its = told.get(epoch, Intervals()), kept.get(epoch, Intervals())
        for where, (one, other) in {"journal": (mine, its), "checkpoint": (its, mine)}.items():
            for start, stop in _without(one, other):
                yield (
                    f"epoch {epoch}: positions {start:,} to {stop:,} are consumed at version "
                    f"{version:,} by the {where} only"
                )


def _consumed(ledger: dict[str, Any]) -> dict[int, Intervals]:
    whole = {epoch: Intervals([(0, ledger["samples"])]) for epoch, *_ in ledger["whole"]}
    return whole | {page["epoch"]: Intervals(page["done"]) for page in ledger["parts"]}


def _without(one: Intervals, other: Intervals) -> Intervals:
    rest = Intervals(one)
    for start, stop in other:
        rest.remove(start, stop)
    return rest
