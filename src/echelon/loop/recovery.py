"""Membership changes: regroup, catch up, reshard, follow servers; safety checkpoints.

Members meet again: whoever was lost is done without, whoever came is brought up to date.

    regroup: wait for a generation ─▶ rejoin: new ways to the others ─▶ heal whoever is behind
    ─▶ the first one leads ─▶ what was due and broken off is done again

If another one is lost on the way, all of it begins anew.
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
from echelon.core.types import Ask, Lease, Shard
from echelon.loop.agreement import Fellows
from echelon.loop.leased_ledger import SharedLedger
from echelon.loop.run import Run

# --- gathering ---

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
        send(healing.peers, run.cut(alone=True, healing=True))
    elif healing.peers is not None:
        run.newcomer = True  # until all of it is here
        run.load(receive(healing.peers), healed=True)
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


# --- starting_over ---
# Members that hold parts of the state go on with other members.
#
# every part still has a holder ─▶ the holders put the state together, and send it to all
# a part is lost with its only holder ─▶ all read the last checkpoint
# ─▶ parts for the new number of members, the state divided among them

NO_STATE = "nobody has the state of this run any more, nor is there a checkpoint"


class Holding(NamedTuple):
    """What a member brings along: which of how many parts, at which version."""

    version: int = -1
    part: int = 0
    parts: int = 0


def holding(run: Run) -> Holding:
    """Found out before the old generation is left: a newcomer, or one that broke off within a
    step, has nothing to bring."""
    held = run.strategy.held()
    if held is not None and run.comm.index == 0:
        run.writer.flush()  # so that all find the same checkpoint
    if held is None or run.newcomer or not run.strategy.settle():
        return Holding()
    return Holding(run.version, *held)


def start_over(run: Run, mine: Holding) -> None:
    """In a new generation: bring the state together, and divide it anew."""
    before = run.version
    cut = _put_together(run, mine)
    run.newcomer = True  # until all of it is there
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


def go_back(run: Run, recorded: int) -> None:
    """Nobody who is here has the run's state: begin where the last checkpoint ends."""
    if run.shelf.versions():
        run.load(run.shelf.load("last"), healed=True)
    elif run.version:
        raise TrainingError(NO_STATE)
    if recorded > run.version:
        run.comm.rolled_back(run.version, "the state was lost with its last holder")


def holders(found: Sequence[Holding]) -> list[int]:
    """Who has the parts, in their order, of the latest version that is whole; nobody if none is."""
    for version, parts in sorted({(h.version, h.parts) for h in found if h.parts}, reverse=True):
        at = {h.part: i for i, h in reversed(list(enumerate(found))) if h[::2] == (version, parts)}
        if len(at) == parts:
            return [at[part] for part in range(parts)]
    return []


def _put_together(run: Run, mine: Holding) -> dict[str, Any] | None:
    """The whole state, from those who hold its parts; None if one is missing."""
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


# --- following ---
# Members whose weights live on servers go on from where the servers are.
#
# the servers are ahead    an update was made of which nobody heard: its samples are consumed
# the servers lost a part  all go back to the last checkpoint, and bring its state to the servers
# the record is ahead      they went back, and whoever was to say so was lost before it was heard
# the record is behind     whoever knew what the last updates were made of was lost before it was
#                          heard, and all go back to the last checkpoint

_JUDGED = {"gate_merit": "merit", "gate_rejected": "rejected"}
"""What the gate knows of a trainer, and the trainer does not."""
_WHY = "a server was lost, and a part of the state with it"
_UNKNOWN = "whoever knew the samples of the last updates was lost"


def follow(run: Run, recorded: int) -> None:
    """Called by all of a new generation together, once nobody is behind the others; `recorded` is
    the version that the journal knows of."""
    servers = cast(RemoteStrategy, run.strategy)
    version = -1 if servers.lacks_state else servers.pull()
    unknown = not servers.apart and not _all_known(servers, run.version, version)
    # One may have gone back, another not yet.
    if run.fellows.sum(int(version < run.version or unknown)):
        _go_back(run, _UNKNOWN if unknown else _WHY)
        version = servers.pull()
    elif version < recorded:
        run.comm.rolled_back(version, _WHY)
    if servers.apart:  # each knows the version of its own last update: all are to do the same now
        run.version, run.met_at = run.fellows.led(version, run.met_at)
        return  # what is consumed is asked for before anybody goes on
    for epoch, start, stop, version, _ in servers.unheard(run.version):
        run.ledger.take_in(Lease(epoch, start, stop), version)
        run.version = version


def _all_known(servers: RemoteStrategy, heard: int, version: int) -> bool:
    """Whether the servers still know what all updates after `heard` were made of."""
    if version <= heard:
        return True
    found = {record[3] for record in servers.unheard(heard) if record[4] >= 0}
    return found.issuperset(range(heard + 1, version + 1))


def count_up(run: Run) -> None:
    """At the end: what every trainer and every server did, for all to know."""
    mine = cast(RemoteStrategy, run.strategy).figures()
    shards = [key for key in mine if key.startswith("shard_")]
    own = {key: value for key, value in mine.items() if key not in shards}
    servers: dict[str, dict[str, float]] = {}
    for key in shards:
        _, shard, name = key.split("_", 2)
        if name in _JUDGED:
            own[_JUDGED[name]] = mine[key]
        elif not name.startswith(("gate_", "member_")):  # of trainers, who count for themselves
            servers.setdefault(shard, {})[name] = mine[key]
    trainers = run.fellows.told(own)
    run.nodes = {"trainers": {str(at): one for at, one in enumerate(trainers)}, "servers": servers}


def _go_back(run: Run, why: str) -> None:
    """The first one reads the last checkpoint, and all go on from there."""
    before, first = run.version, run.comm.index == 0
    everybody = cast(Group, run.comm).collective()
    if first:
        run.writer.flush()
        if not run.shelf.versions():
            raise TrainingError("the servers lost the state of this run; there is no checkpoint")
        run.load(run.shelf.load("last"), healed=True)
        send(everybody, run.cut(alone=True, healing=True))
    else:
        run.newcomer = True  # until all of it is here
        run.load(receive(everybody), healed=True)
    run.comm.rolled_back(run.version, why)
    if first:
        run.notice(f"{why}: went back from step {before} to the checkpoint of step {run.version}")


# --- heal ---
# One member's cut, sent to members that are behind: from memory to memory, nothing on disk.
#
# source:  cut ─▶ outline (names, shapes, plain values) ─▶ tensors, one behind the other
# behind:  outline ─▶ room for the tensors ─▶ the same cut


def send(peers: Sending, cut: dict[str, Any]) -> None:
    """To all other members of `peers`, of which this one is the first."""
    tensors, skeleton = flatten(cut)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in held.items()}
    outline = json.dumps({"skeleton": skeleton, "tensors": shapes}).encode()
    peers.broadcast_([torch.tensor([len(outline)])])
    peers.broadcast_([torch.frombuffer(bytearray(outline), dtype=torch.uint8)])
    peers.broadcast_([tensor for tensor in held.values() if tensor.numel()])


def receive(peers: Sending) -> dict[str, Any]:
    """What the first member of `peers` sends."""
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


# --- meeting ---
# Members that make updates each for itself come together now and then.
#
# asked to, or nothing left to hold ─▶ rest ─▶ all are here: nobody pushes ─▶ one version for all
# ─▶ what is due: evaluate, checkpoint, stop, regroup ─▶ each goes its own way again


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


# --- safety ---
# What keeps a run safe: a first and a last checkpoint, and no update that is not finite.


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
