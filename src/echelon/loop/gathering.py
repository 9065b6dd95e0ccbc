"""Members meet again: whoever was lost is done without, whoever came is brought up to date.

    regroup: wait for a generation ─▶ rejoin: new ways to the others ─▶ heal whoever is behind
    ─▶ the first one leads ─▶ what was due and broken off is done again

If another one is lost on the way, all of it begins anew.
"""

from __future__ import annotations

import time

from echelon.comm.peers import is_torn
from echelon.core.errors import PeerError
from echelon.core.interfaces import Healing
from echelon.core.types import Shard
from echelon.loop import heal
from echelon.loop.fellows import Fellows
from echelon.loop.following import follow
from echelon.loop.run import Run
from echelon.loop.starting_over import Holding, go_back, holding, start_over

SLOW = 1.5
"""A member so much slower than the others is worth a word."""


def lost(run: Run, error: PeerError | RuntimeError) -> None:
    """Another member is gone: the rest meets again, where it can."""
    if not run.comm.elastic or not (isinstance(error, PeerError) or is_torn(error)):
        raise error
    known = error if isinstance(error, PeerError) else PeerError("a connection broke")
    run.missed, run.gathering = known, True


def gather(run: Run) -> None:
    """Meet again if somebody was lost or came; divide batches anew if somebody is slow."""
    if not run.gathering:
        return
    if run.missed or run.arrivals or run.newcomer:
        _meet_again(run)
    else:
        _divide(run)
    run.loader.shard = Shard() if run.strategy.apart else run.strategy.shard
    if run.valid is not None:
        run.valid.shard = run.strategy.shard
    run.gathering = False
    if run.version > 0 and not run.strategy.apart:  # those apart first ask what is consumed
        run.attend()  # the loss may have come between an update and what was due after it


def _meet_again(run: Run) -> None:
    began, before, came = time.perf_counter(), run.comm.count, run.newcomer
    if run.clerk is not None:
        run.clerk.keep()  # of the generation it was done in
    mine = holding(run)
    healing = run.comm.regroup([-1] if came else run.progress, run.missed)
    run.share_cores(run.comm.count)
    if run.strategy.alone:
        _rejoin(run, healing)
    else:
        start_over(run, mine if mine.version <= healing.recorded else Holding())
    run.newcomer = False
    _agree_on_the_end(run)
    run.met_again()
    run.lead()
    if run.comm.index == 0 and not came:
        _tell(run, before, time.perf_counter() - began)
    run.missed, run.arrivals = None, False


def _agree_on_the_end(run: Run) -> None:
    """Whoever came, or was brought up to date, has not heard that all are to stop."""
    said = run.fellows.told([run.interrupted, run.timed_out])
    interrupted, timed_out = (next(filter(None, why), None) for why in zip(*said, strict=True))
    run.interrupted, run.timed_out = interrupted, timed_out


def _rejoin(run: Run, healing: Healing) -> None:
    """Each has all of the state: only whoever is behind needs another one's."""
    run.strategy.rejoin()
    run.fellows = Fellows(run.comm, run.strategy.shard, run.job.seed)
    if healing.anew:
        go_back(run, healing.recorded)
    if healing.peers is not None and healing.sends:
        heal.send(healing.peers, run.cut(alone=True, healing=True))
    elif healing.peers is not None:
        run.newcomer = True  # until all of it is here
        run.load(heal.receive(healing.peers), healed=True)
    if run.strategy.remote:
        follow(run, healing.recorded)


def _tell(run: Run, before: int, seconds: float) -> None:
    left = "1 member goes" if run.comm.count == 1 else f"{run.comm.count} members go"
    now = f"{left} on after {seconds:.2f} s"
    if run.missed is not None:
        run.notice(f"{run.missed}; {now}")
    else:
        run.notice(f"{run.comm.count - before} joined; {now}")


def _divide(run: Run) -> None:
    shares = run.strategy.balance()
    run.comm.divided(run.version + 1, shares)
    slowest = min(range(len(shares)), key=shares.__getitem__)
    usual = sorted(shares)[len(shares) // 2]
    if run.comm.index == 0 and usual > SLOW * shares[slowest]:
        run.notice(
            f"member {slowest} is {usual / shares[slowest]:.1f} times slower than the others: "
            f"it gets {shares[slowest]:.1%} of each batch"
        )
