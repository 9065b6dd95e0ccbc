"""Members that hold parts of the state go on with other members.

every part still has a holder ─▶ the holders put the state together, and send it to all
a part is lost with its only holder ─▶ all read the last checkpoint
─▶ parts for the new number of members, the state divided among them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from echelon.comm.group import Group
from echelon.core.errors import TrainingError
from echelon.loop import heal
from echelon.loop.fellows import Fellows
from echelon.loop.run import Run

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
        heal.send(peers, cut)
        return cut
    return heal.receive(peers)
