"""The journal of a run: written by the first member, and audited against the checkpoint.

`journalled` keeps the journal of a run that has no coordinator: its first member writes what it
commits. In an elastic group the coordinator writes the journal. `audit` replays the journal of
either kind and proves from it that every sample was consumed exactly once.
"""

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
from echelon.data.ledger import Ledger
from echelon.data.proof import Account, Replay, account, replay

if TYPE_CHECKING:
    from echelon.loop.run import Run


# Writing: without a coordinator, the first member keeps the journal

EVERY = 1.0
"""Seconds between two writes; each is one line, however many steps were committed."""
DAMAGED = "journal.damaged.jsonl"
"""The name to which an unreadable journal is moved."""


@contextmanager
def journalled(run: Run, name: str, folder: Path, *, resumed: bool) -> Iterator[None]:
    """Keep the run's journal while inside, unless this member already has a recorder."""
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


class Clerk:
    """Writes what the ledger recorded: now and then, before each checkpoint, and at the end.

    Everything that a checkpoint contains is in the journal before it. Records that are not written
    yet are lost if this process dies, but so are their updates. A journal that cannot be written
    does not end the run: that is noticed once, and the missing lines are written later.
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
        """Write the beginning of a new run, whose batches are split into `parts` parts."""
        self._add_generation(about, 0, "the run began", members, parts)
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
        """Write that a run continues from a checkpoint; updates after its version are undone."""
        found = self._known()
        self._generation = max(found.generations, default=0)
        unknown = found.samples == 0 or not found.base <= version <= found.version
        if not unknown and (found.version > version or found.at_odds(version, left_out)):
            why = "the run went on from its checkpoint"
            self._add("rolled_back", version=version, why=why, left_out=left_out)
        self._add_generation(about, version, "the run was resumed", members, parts)
        if unknown:
            ledger = self._ledger.state_dict()
            self._add("taken_over", version=version, ledger=ledger, left_out=left_out)
        self._write(sync=True)

    def tick(self) -> None:
        """Write if the last time is long enough ago; called often."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.keep()

    def keep(self) -> None:
        """Write all committed records now; called before they become part of a checkpoint."""
        for record in self._ledger.drain():
            self._add("committed", generation=self._generation, **record._asdict())
        self._write()

    def finished(self, status: str, version: int) -> None:
        self.keep()
        self._add("finished", status=status, version=version)
        self._write(sync=True)

    def close(self) -> None:
        self._journal.close()

    def _add_generation(
        self, about: dict[str, Any], version: int, why: str, members: int, parts: int
    ) -> None:
        """Write a new generation and its members. Only this member's own process is known."""
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
        """Replay the journal so far. Move it aside if it cannot be read, and start a new one."""
        try:
            return replay(self.path)
        except DataError as error:
            self._journal.close()
            self.path.replace(self.path.with_name(DAMAGED))
            self._journal = Journal(self.path)
            self._notice(f"{error}; it is kept as {DAMAGED}, and the proof begins anew")
            return Replay()

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


# Auditing: the proof from a journal that every sample was consumed exactly once


def audit(folder: Path, *, checkpoint: bool) -> Account:
    """Prove from the journal in `folder` that every sample was consumed exactly once.

    The result lists all problems. With `checkpoint`, compare with the newest checkpoint, too.
    """
    path = folder / JOURNAL
    if not path.exists():
        raise RunError(
            f"run {folder.name!r} has no journal: it was made before there were any "
            f"(if it is resumed, its proof begins there)"
        )
    # Read the checkpoint first: what it contains is in the journal already, also in a live run.
    cut = _newest(folder) if checkpoint else None
    found = replay(path)
    if not found.samples:
        raise DataError(f"{path}: the journal has no beginning: it is empty, or was cut off")
    proof = account(found)
    if cut is not None:
        proof.problems += _differences(found, cut)
    return proof


def require_exact(proof: Account) -> None:
    """Raise the problems of a proof, if there are any, in one line."""
    if proof.problems:
        first, *others = proof.problems
        more = f" (and {len(others)} more)" if others else ""
        raise ProofError(f"run {proof.run!r} is not exactly once: {first}{more}")


class ProofError(TrainingError):
    """Some sample was not consumed exactly once, or it cannot be proved."""


def _newest(folder: Path) -> dict[str, Any] | None:
    """Return the newest complete checkpoint, or None."""
    try:
        return Shelf(folder / CHECKPOINTS).load("last")
    except RunError:
        return None


def _differences(found: Replay, cut: dict[str, Any]) -> Iterator[str]:
    """Yield where the ledger in a checkpoint and the journal disagree."""
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
