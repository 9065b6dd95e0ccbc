"""What keeps a run safe: a first and a last checkpoint, and no update that is not finite."""

from __future__ import annotations

from echelon.core.errors import NonFiniteError
from echelon.core.types import Lease
from echelon.loop.run import Run


def secure(run: Run) -> None:
    """Where a part of the state may be lost with its holder, there is a first checkpoint."""
    safe = run.strategy.alone and not run.strategy.remote
    if run.comm.elastic and not (safe or run.secured or run.version):
        run.save(last=True)  # on disk before the first update, which needs all members
    run.secured = True


def skip_or_raise(run: Run, lease: Lease, error: NonFiniteError) -> None:
    """A non-finite update was not applied: end the run, or leave its samples out."""
    if run.job.health.non_finite == "stop":
        raise error
    run.ledger.leave_out(lease, run.version)
    run.left_out.append(lease)
    run.notice(
        f"{error}; left out {lease.size} samples (epoch {lease.epoch}, "
        f"positions {lease.start} to {lease.stop})"
    )


def save_last_words(run: Run) -> None:
    """A run that breaks off leaves its last update behind, if this member has all of it."""
    if run.comm.index or not run.strategy.alone:
        return
    if run.version <= max([run.writer.saved, *run.shelf.versions()]):  # be it by another one
        return
    if run.strategy.apart:  # others may be making updates
        return
    if run.comm.on_record(run.version) is False:  # its samples would count as never seen
        return
    try:
        cut = run.cut(alone=True) if run.strategy.settle() else None
        if cut and cut["strategy"]["version"] == run.version:
            run.writer.save_now(run.version, cut)
    except Exception as error:  # whatever it is: there is a first error to be told
        run.notice(f"the last update was not saved: {type(error).__name__}: {error}")
