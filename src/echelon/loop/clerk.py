"""Keeps a run's journal where no coordinator does: the first member writes what it commits."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.comm.peers import this_host
from echelon.core.errors import DataError
from echelon.core.format import warn
from echelon.core.types import Lease
from echelon.data.journal import JOURNAL, Journal, JournalError
from echelon.data.ledger import Ledger, Record
from echelon.data.proof import Replay, replay

if TYPE_CHECKING:
    from echelon.loop.run import Run

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
