"""The training loop.


    for each epoch
        for each lease of its order, with its micro-batches
            compute ─▶ update ─▶ commit ─▶ what is due: progress, log, evaluate, checkpoint
                          └─ not committed ─▶ the lease goes back, and is the next one again
        the epoch's end: evaluate, checkpoint
    the end: evaluate, checkpoint
    a member is lost or joins, at any point ─▶ gather: form a new generation, bring outdated members
                                               up to date ─▶ continue here
    members that update independently ─▶ meet before anything that all members do together

The loop knows nothing about processes: the strategy decides where gradients are summed. After a
loss, everything can be called again: a commit, an evaluation or a checkpoint that is already done
is not repeated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TypeAlias, cast

from echelon.core.errors import NonFiniteError, PeerError
from echelon.core.interfaces import RemoteStrategy, Strategy
from echelon.core.types import Batch, Lease
from echelon.loop.meeting import count_up, meet, open_ledger
from echelon.loop.recovery import gather, lost, secure, skip_or_raise
from echelon.loop.run import Run


def train(run: Run) -> str:
    """Train until the run ends, and return the reason. Recover from lost members on the way."""
    while True:
        try:
            gather(run)
            secure(run)
            if (reason := _epochs(run)) is None:
                continue
            run.finish()
            if run.strategy.remote:
                count_up(run)
            run.fellows.part()
            return reason
        except (PeerError, RuntimeError) as error:
            lost(run, error)


def _epochs(run: Run) -> str | None:
    """Train epoch by epoch. Return why the run is over, or None if the members have to `gather`
    first, after which version, ledger and strategy may be different."""
    if run.strategy.apart and not run.opened:
        open_ledger(run)
        run.opened = True
    if reason := run.over():
        return reason
    for epoch in itertools.count(run.epoch):
        if run.limits.epochs is not None and epoch >= run.limits.epochs:
            return f"{run.limits.epochs} epochs done"
        run.epoch = epoch
        while run.ledger.remaining(epoch):
            reason = _pass(run, epoch)
            if run.to_meet:
                reason = meet(run)
            if reason or run.gathering:
                return reason
        if reason := run.epoch_done():
            return reason
    raise AssertionError("epochs never end by themselves")


def _pass(run: Run, epoch: int) -> str | None:
    """Train on what is left of the epoch, up to the first update that is not committed.

    Return why the run is over, or None.
    """
    strategy, ledger, meter = run.strategy, run.ledger, run.meter
    compute, update, commit, clock = (
        strategy.compute,
        strategy.update,
        ledger.commit,
        time.perf_counter,
    )
    attend = run.glance if strategy.apart else run.attend
    stream = run.loader.stream(ledger.leases(epoch, run.batch_size))
    try:
        with closing(stream):
            for lease, micro in told_ahead(strategy, stream):
                compute(micro)
                try:
                    done = update(lease)
                except NonFiniteError as error:
                    skip_or_raise(run, lease, error)
                    if error.asked:
                        run.heed(error.asked)
                    if not strategy.apart and (reason := run.over()):
                        return reason
                    if run.heard:
                        return None
                    continue
                if done.asked:
                    run.heed(done.asked)
                if not done.committed:
                    if done.reason:
                        run.notice(done.reason)
                    return None
                commit(lease, done.version)
                meter.add(done, lease.stop - lease.start, done.version - run.version)
                version = run.version = done.version
                if (version >= run.due_at or clock() >= run.tick_at) and (reason := attend()):
                    return reason
                if run.gathering or run.heard:
                    return None
        return None
    finally:
        # Leases that were read ahead but not trained on have to be handed out again.
        ledger.give_back_all()


Leased: TypeAlias = "tuple[Lease, list[Batch]]"


def told_ahead(strategy: Strategy, stream: Iterator[Leased]) -> Iterator[Leased]:
    """Pass the next batch to the strategy one step early, so that it can prefetch embedding rows.

    Strategies that do not prefetch get the stream unchanged.
    """
    remote = cast(RemoteStrategy, strategy)
    if not (strategy.remote and remote.foresees):
        return stream
    return _look_ahead(remote, stream)


def _look_ahead(strategy: RemoteStrategy, stream: Iterator[Leased]) -> Iterator[Leased]:
    following = next(stream, None)
    while following is not None:
        this, following = following, next(stream, None)
        strategy.expect(() if following is None else following[1])
        yield this
