"""JournalWriter, audit."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.checkpoint import Shelf
from echelon.checkpoint.store import CHECKPOINTS
from echelon.comm.peers import this_host
from echelon.core.errors import DataError, RunError, TrainingError
from echelon.core.format import warn
from echelon.core.types import Lease
from echelon.data.intervals import Intervals
from echelon.data.journal import JOURNAL, Journal, JournalError
from echelon.data.ledger import Ledger, Record
from echelon.data.proof import Account, Replay, account, replay

if TYPE_CHECKING:
    from echelon.loop.run import Run


# --- clerk ---
# Keeps a run's journal where no coordinator does: the first member writes what it commits.

EVERY = 1.0
"""Seconds between two looks at what was committed: a line each, however many steps."""
DAMAGED = "journal.damaged.jsonl"


class Clerk:
    """Writes down what the ledger recorded: now and then, before each checkpoint, at the end.

    What a checkpoint holds was written before it. What was not dies with this process, and so do
    the updates it tells of. A journal that cannot be written does not end a run: it is told once,
    and what is missing is written as soon as it can be.
    """

    def __init__(self, folder: Path, ledger: Ledger, notice: Callable[[str], None]) -> None:
        self.path = folder / JOURNAL
        self._ledger = ledger
        self._notice = notice
        self._journal = Journal(self.path)
        self._generation = 0
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._next = 0.0
        self._told = False

    def begun(self, about: dict[str, Any], *, members: int, parts: int) -> None:
        """A run begins; `parts` is in how many a batch is split among the members."""
        self._sit_down(about, 0, "the run began", members, parts)
        self._write(sync=True)

    def resumed(
        self,
        about: dict[str, Any],
        version: int,
        left_out: Sequence[Lease],
        *,
        members: int,
        parts: int,
    ) -> None:
        """A run goes on from a checkpoint: what was done after its version is undone."""
        found = self._known()
        self._generation = max(found.generations, default=0)
        unknown = found.samples == 0 or not found.base <= version <= found.version
        if not unknown and (found.version > version or found.at_odds(version, left_out)):
            why = "the run went on from its checkpoint"
            self._add("rolled_back", version=version, why=why, left_out=left_out)
        self._sit_down(about, version, "the run was resumed", members, parts)
        if unknown:
            ledger = self._ledger.state_dict()
            self._add("taken_over", version=version, ledger=ledger, left_out=left_out)
        self._write(sync=True)

    def tick(self) -> None:
        """Called often; writes seldom."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.keep()

    def keep(self) -> None:
        """Write all that is committed, before it becomes part of a checkpoint."""
        for record in self._ledger.drain():
            self._committed(record)
        self._write()

    def finished(self, status: str, version: int) -> None:
        self.keep()
        self._add("finished", status=status, version=version)
        self._write(sync=True)

    def close(self) -> None:
        self._journal.close()

    def _sit_down(
        self, about: dict[str, Any], version: int, why: str, members: int, parts: int
    ) -> None:
        """Members are known by their place; of the others' processes the first knows nothing."""
        self._generation += 1
        self._add("begun", **about, workers=members)
        for member in range(members):
            pid, host = (None, None) if member else (os.getpid(), this_host())
            self._add("joined", member=member, pid=pid, host=host, name="trainer")
        self._add(
            "generation",
            number=self._generation,
            members=list(range(members)),
            version=version,
            why=why,
            shares=None,
            parts=parts,
        )

    def _known(self) -> Replay:
        """What the journal says so far; one that cannot be read is put aside."""
        try:
            return replay(self.path)
        except DataError as error:
            self._journal.close()
            self.path.replace(self.path.with_name(DAMAGED))
            self._journal = Journal(self.path)
            self._notice(f"{error}; it is kept as {DAMAGED}, and the proof begins anew")
            return Replay()

    def _committed(self, record: Record) -> None:
        self._add("committed", generation=self._generation, **record._asdict())

    def _add(self, kind: str, **fields: Any) -> None:
        self._waiting.append((kind, fields))

    def _write(self, *, sync: bool = False) -> None:
        waiting = self._waiting
        try:
            while waiting:
                kind, fields = waiting[0]
                self._journal.add(kind, **fields)
                waiting.popleft()
            if sync:
                self._journal.sync()
            self._told = False
        except JournalError as error:
            if not self._told:
                self._told = True
                self._notice(f"{error}; training goes on, and what is missing is written later")


@contextmanager
def journalled(run: Run, name: str, folder: Path, *, resumed: bool) -> Iterator[None]:
    """While inside, the run's journal is kept, unless somebody else does it."""
    if run.clerk is not None:
        yield
        return
    job, members, parts = run.job, run.comm.count, run.strategy.shard.count
    about = {
        "run": name,
        "samples": run.ledger.samples,
        "batch_size": job.batch_size,
        "seed": job.seed,
    }
    with closing(Clerk(folder, run.ledger, run.pending.append)) as clerk:
        if resumed:
            clerk.resumed(about, run.version, run.left_out, members=members, parts=parts)
        else:
            clerk.begun(about, members=members, parts=parts)
        run.clerk = clerk
        status = "failed"
        try:
            yield
            status = "stopped" if run.interrupted else "done"
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            clerk.finished(status, run.version)
            run.clerk = None
            for problem in run.pending:
                warn(problem)


# --- audit ---
# The proof of a run: from its journal, and checked against its newest checkpoint.


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
