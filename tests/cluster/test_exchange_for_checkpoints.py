"""Members exchange what a checkpoint needs from all of them."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from echelon.checkpoint import state
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.comm.group import Group
from echelon.core.errors import RunError
from echelon.core.types import Shard
from echelon.loop.agreement import Fellows

pytestmark = pytest.mark.timeout(120)


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand()), random.gauss(0, 1)]


def test_a_shard_draws_on_where_it_was_and_a_new_one_on_its_own() -> None:
    def work(member: Member) -> dict[str, Any]:
        at = member.place.index
        with closing(Group(member.place)) as group:
            # Two of the four read the same part of a batch.
            fellows = Fellows(group, Shard(at // 2, 2), seed=0)
            state.seed(at // 2)
            random.gauss(0, 1)  # leaves another one in store
            kept = fellows.draws()
            expected = drawn()
            state.seed(99)
            fellows.go_on(kept, version=5)
            assert drawn() == expected
            assert list(kept) == [0, 1]
            new = Fellows(group, Shard(2, 3), seed=0)
            new.go_on(kept, version=5)
            first = drawn()
            new.go_on(kept, version=5)
            assert drawn() == first != expected
        return {}

    launch(4, work, deadline=30)


def test_members_that_found_different_cuts_do_not_go_on() -> None:
    def work(member: Member) -> dict[str, Any]:
        with closing(Group(member.place)) as group:
            fellows = Fellows(group, Shard(member.place.index, 2), seed=0)
            fellows.check_version(20, "runs")
            fellows.check_version(20 + member.place.index, "runs/mine-0001/checkpoints")
        return {}

    with pytest.raises(RunError, match=r"different steps \(member 0: 20, member 1: 21\)"):
        launch(2, work, deadline=30)


def test_all_go_by_what_the_first_one_found() -> None:
    def work(member: Member) -> dict[str, Any]:
        at = member.place.index
        with closing(Group(member.place)) as group:
            assert Fellows(group, Shard(), seed=0).led(10 + at, 7 * at) == [10, 0]
        return {}

    launch(3, work, deadline=30)
