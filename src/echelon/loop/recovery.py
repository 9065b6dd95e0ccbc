"""Continue after a membership change: without lost members, and with new ones brought up to date.

    regroup: wait for a generation ─▶ connect to its members ─▶ bring outdated members up to date
    ─▶ the first member leads ─▶ repeat what was due when the loss came

If another member is lost on the way, all of this starts over: `train` calls `lost`, then `gather`.

How outdated members get the state depends on where it is: a replicated state is sent by the most
advanced member (`send`, `receive`), a state in parts is put together by its holders (`start_over`),
and weights on servers are pulled from there (`follow`). The safety functions at the end make sure
that there is a checkpoint to go back to, and handle updates that are not finite.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from echelon.checkpoint.state import flatten, unflatten
from echelon.comm.group import Group
from echelon.comm.peers import is_torn
from echelon.core.errors import NonFiniteError, PeerError, TrainingError
from echelon.core.interfaces import Healing, RemoteStrategy, Sending
from echelon.core.types import Lease, Shard
from echelon.loop.agreement import Fellows
from echelon.loop.run import Run

SLOW = 1.5
"""A member that is slower than the others by this factor is reported."""
_WHY = "a server was lost, and a part of the state with it"
_UNKNOWN = "whoever knew the samples of the last updates was lost"
NO_STATE = "nobody has the state of this run any more, nor is there a checkpoint"


def lost(run: Run, error: PeerError | RuntimeError) -> None:
    """Note that another member is lost, or raise the error if the group cannot continue."""
    if not run.comm.elastic or not (isinstance(error, PeerError) or is_torn(error)):
        raise error
    known = error if isinstance(error, PeerError) else PeerError("a connection broke")
    run.missed, run.gathering = known, True


def gather(run: Run) -> None:
    """Form a new generation if a member was lost or joins; rebalance batches if one is slow."""
    if not run.gathering:
        return
    if run.missed or run.arrivals or run.newcomer:
        _regroup(run)
    else:
        _rebalance(run)
    run.loader.shard = Shard() if run.strategy.apart else run.strategy.shard
    if run.valid is not None:
        run.valid.shard = run.strategy.shard
    run.gathering = False
    # The loss may have come between an update and what was due after it. Members that update
    # independently do this in `open_ledger`, once they know what is consumed.
    if run.version > 0 and not run.strategy.apart:
        run.attend()


def _regroup(run: Run) -> None:
    """Wait for the next generation and join it with an up-to-date state."""
    began, before, came = time.perf_counter(), run.comm.count, run.newcomer
    if run.clerk is not None:
        run.clerk.keep()  # commits belong to the generation in which they were made
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
        _report(run, before, time.perf_counter() - began)
    run.missed, run.arrivals = None, False


def _rejoin(run: Run, healing: Healing) -> None:
    """Rejoin where every member has the complete state: only outdated ones receive it."""
    run.strategy.rejoin()
    run.fellows = Fellows(run.comm, run.strategy.shard, run.job.seed)
    if healing.anew:
        go_back(run, healing.recorded)
    if healing.peers is not None and healing.sends:
        send(healing.peers, run.cut(alone=True, healing=True))
    elif healing.peers is not None:
        run.newcomer = True  # until the complete state has arrived
        run.load(receive(healing.peers), healed=True)
    if run.strategy.remote:
        follow(run, healing.recorded)


def go_back(run: Run, recorded: int) -> None:
    """Load the last checkpoint, because no present member has the run's state."""
    if run.shelf.versions():
        run.load(run.shelf.load("last"), healed=True)
    elif run.version:
        raise TrainingError(NO_STATE)
    if recorded > run.version:
        run.comm.rolled_back(run.version, "the state was lost with its last holder")


def _agree_on_the_end(run: Run) -> None:
    """Share the reasons to stop with members that joined or were brought up to date."""
    said = run.fellows.told([run.interrupted, run.timed_out])
    interrupted, timed_out = (next(filter(None, why), None) for why in zip(*said, strict=True))
    run.interrupted, run.timed_out = interrupted, timed_out


def _report(run: Run, before: int, seconds: float) -> None:
    """Report which member was lost, or how many joined, and the seconds that it took."""
    left = "1 member goes" if run.comm.count == 1 else f"{run.comm.count} members go"
    now = f"{left} on after {seconds:.2f} s"
    if run.missed is not None:
        run.notice(f"{run.missed}; {now}")
    else:
        run.notice(f"{run.comm.count - before} joined; {now}")


def _rebalance(run: Run) -> None:
    """Divide batches by the members' speeds, and report a member that is much slower."""
    shares = run.strategy.balance()
    run.comm.divided(run.version + 1, shares)
    slowest = min(range(len(shares)), key=shares.__getitem__)
    usual = sorted(shares)[len(shares) // 2]
    if run.comm.index == 0 and usual > SLOW * shares[slowest]:
        run.notice(
            f"member {slowest} is {usual / shares[slowest]:.1f} times slower than the others: "
            f"it gets {shares[slowest]:.1%} of each batch"
        )


# State that members hold in parts
#
# every part still has a holder ─▶ the holders put the state together and send it to all
# a part is lost with its only holder ─▶ all members read the last checkpoint
# ─▶ the state is divided into parts for the new number of members


class Holding(NamedTuple):
    """The part of the state that a member holds: which of how many parts, at which version."""

    version: int = -1
    part: int = 0
    parts: int = 0


def holding(run: Run) -> Holding:
    """Return what this member holds. Called before it leaves the old generation.

    A newcomer, or a member that was interrupted within a step, holds nothing of use.
    """
    held = run.strategy.held()
    if held is not None and run.comm.index == 0:
        run.writer.flush()  # all members have to find the same checkpoint
    if held is None or run.newcomer or not run.strategy.settle():
        return Holding()
    return Holding(run.version, *held)


def start_over(run: Run, mine: Holding) -> None:
    """Put the state together in a new generation and divide it among the present members."""
    before = run.version
    cut = _put_together(run, mine)
    run.newcomer = True  # until the complete state has arrived
    run.strategy.let_go()
    run.strategy = run.rebuild()
    run.fellows = Fellows(run.comm, run.strategy.shard, run.job.seed)
    if cut is not None:
        run.load(cut, healed=True)
        return
    if run.shelf.versions():
        run.load(run.shelf.load("last"), healed=True)
    elif before:
        raise TrainingError(NO_STATE)
    run.fellows.check_version(run.version, run.shelf.folder)
    if before > run.version:
        run.comm.rolled_back(run.version, "a part of the state was lost with its only holder")
        if run.comm.index == 0:
            run.notice(f"went back from step {before} to the checkpoint of step {run.version}")


def _put_together(run: Run, mine: Holding) -> dict[str, Any] | None:
    """Return the complete state, collected from the holders of its parts; None if one is lost."""
    comm = cast(Group, run.comm)
    board = torch.zeros(comm.count, len(mine), dtype=torch.int64)
    board[comm.index] = torch.tensor(mine)
    comm.collective().sum_(board)
    chosen = holders([Holding(*row) for row in board.tolist()])
    if not chosen:
        return None
    cut: dict[str, Any] = {}
    if comm.index in chosen:
        run.strategy.lend(comm.collective(chosen))
        cut = run.cut(alone=True)
    first = chosen[0]
    peers = comm.collective([first, *(i for i in range(comm.count) if i != first)])
    if comm.index == first:
        send(peers, cut)
        return cut
    return receive(peers)


def holders(found: Sequence[Holding]) -> list[int]:
    """Return the members that hold the parts of the latest complete version, in part order.

    Empty if no version is complete.
    """
    for version, parts in sorted({(h.version, h.parts) for h in found if h.parts}, reverse=True):
        at = {h.part: i for i, h in reversed(list(enumerate(found))) if h[::2] == (version, parts)}
        if len(at) == parts:
            return [at[part] for part in range(parts)]
    return []


# Weights that live on servers
#
# the servers are ahead    an update was made that no member heard of: its samples are consumed
# the servers lost a part  all go back to the last checkpoint and load it into the servers
# the journal is ahead     the servers went back, but the member that was to report it was lost
# the journal is behind    the members that knew the samples of the last updates were lost before
#                          they reported them: all go back to the last checkpoint


def follow(run: Run, recorded: int) -> None:
    """Continue from the version of the servers. `recorded` is the last version in the journal.

    All members of a new generation call this together, when no member is behind the others.
    """
    servers = cast(RemoteStrategy, run.strategy)
    version = -1 if servers.lacks_state else servers.pull()
    unknown = not servers.apart and not _all_known(servers, run.version, version)
    # Some members may have gone back already, others not: all go back if any has to.
    if run.fellows.sum(int(version < run.version or unknown)):
        _restore_servers(run, _UNKNOWN if unknown else _WHY)
        version = servers.pull()
    elif version < recorded:
        run.comm.rolled_back(version, _WHY)
    if servers.apart:
        # Each member knows only the version of its own last update; from here on all must do the
        # same. `open_ledger` asks what is consumed before any member continues.
        run.version, run.met_at = run.fellows.led(version, run.met_at)
        return
    for epoch, start, stop, version, _ in servers.unheard(run.version):
        run.ledger.take_in(Lease(epoch, start, stop), version)
        run.version = version


def _all_known(servers: RemoteStrategy, heard: int, version: int) -> bool:
    """Return whether the servers still know the samples of all updates after `heard`."""
    if version <= heard:
        return True
    found = {record[3] for record in servers.unheard(heard) if record[4] >= 0}
    return found.issuperset(range(heard + 1, version + 1))


def _restore_servers(run: Run, why: str) -> None:
    """Go back to the last checkpoint: the first member reads it and sends it to the others."""
    before, first = run.version, run.comm.index == 0
    everybody = cast(Group, run.comm).collective()
    if first:
        run.writer.flush()
        if not run.shelf.versions():
            raise TrainingError("the servers lost the state of this run; there is no checkpoint")
        run.load(run.shelf.load("last"), healed=True)
        send(everybody, run.cut(alone=True, healing=True))
    else:
        run.newcomer = True  # until the complete state has arrived
        run.load(receive(everybody), healed=True)
    run.comm.rolled_back(run.version, why)
    if first:
        run.notice(f"{why}: went back from step {before} to the checkpoint of step {run.version}")


# One member's state, sent to members that are behind: from memory to memory
#
# source:  cut ─▶ outline (names, shapes, plain values) ─▶ tensors, one after the other
# behind:  outline ─▶ memory for the tensors ─▶ the same cut


def send(peers: Sending, cut: dict[str, Any]) -> None:
    """Send `cut` to all other members of `peers`. Called by the first member."""
    tensors, skeleton = flatten(cut)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in held.items()}
    outline = json.dumps({"skeleton": skeleton, "tensors": shapes}).encode()
    peers.broadcast_([torch.tensor([len(outline)])])
    peers.broadcast_([torch.frombuffer(bytearray(outline), dtype=torch.uint8)])
    peers.broadcast_([tensor for tensor in held.values() if tensor.numel()])


def receive(peers: Sending) -> dict[str, Any]:
    """Return the state that the first member of `peers` sends."""
    length = torch.tensor([0])
    peers.broadcast_([length])
    text = torch.empty(int(length), dtype=torch.uint8)
    peers.broadcast_([text])
    outline = json.loads(text.numpy().tobytes())
    held = {
        name: torch.empty(shape, dtype=getattr(torch, kind))
        for name, (kind, *shape) in outline["tensors"].items()
    }
    peers.broadcast_([tensor for tensor in held.values() if tensor.numel()])
    cut = unflatten(held, outline["skeleton"])
    assert isinstance(cut, dict)
    return cut


# Safety: a first and a last checkpoint, and no update that is not finite


def secure(run: Run) -> None:
    """Save a first checkpoint if a part of the state could be lost with its holder."""
    safe = run.strategy.alone and not run.strategy.remote
    if run.comm.elastic and not (safe or run.secured or run.version):
        run.save(last=True)  # on disk before the first update, which needs all members
    run.secured = True


def skip_or_raise(run: Run, lease: Lease, error: NonFiniteError) -> None:
    """Raise `error`, or skip the samples of a non-finite update, as `health.non_finite` says."""
    if run.job.health.non_finite == "stop":
        raise error
    run.ledger.leave_out(lease, run.version)
    run.left_out.append(lease)
    run.notice(
        f"{error}; left out {lease.size} samples (epoch {lease.epoch}, "
        f"positions {lease.start} to {lease.stop})"
    )


def save_last_words(run: Run) -> None:
    """Save the last update of a run that fails, if this member has the complete state."""
    if run.comm.index or not run.strategy.alone:
        return
    # The checkpoint may have been written by another member.
    if run.version <= max([run.writer.saved, *run.shelf.versions()]):
        return
    if run.strategy.apart:  # other members may be updating the weights
        return
    if run.comm.on_record(run.version) is False:  # the journal lacks the samples of this update
        return
    try:
        cut = run.cut(alone=True) if run.strategy.settle() else None
        if cut and cut["strategy"]["version"] == run.version:
            run.writer.save_now(run.version, cut)
    except Exception as error:  # must not replace the error by which the run fails
        run.notice(f"the last update was not saved: {type(error).__name__}: {error}")
