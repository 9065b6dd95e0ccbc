"""A lost member: form a new generation where the group is elastic, otherwise fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echelon.core.errors import PeerError
from echelon.loop import recovery


def run(*, elastic: bool) -> Any:
    return SimpleNamespace(comm=SimpleNamespace(elastic=elastic), missed=None, gathering=False)


def test_members_that_can_do_without_each_other_are_to_meet_again() -> None:
    here, error = run(elastic=True), PeerError("member 2 is gone")
    recovery.lost(here, error)
    assert here.missed is error
    assert here.gathering


def test_others_end_with_what_they_missed() -> None:
    here = run(elastic=False)
    with pytest.raises(PeerError, match="member 2 is gone"):
        recovery.lost(here, PeerError("member 2 is gone"))
    assert not here.gathering


def test_an_error_of_ones_own_is_no_loss() -> None:
    here = run(elastic=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recovery.lost(here, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not here.gathering


def test_nobody_meets_where_nobody_was_lost() -> None:
    here = SimpleNamespace(gathering=False)  # whoever meets needs more than that
    recovery.gather(here)  # type: ignore[arg-type]
    assert vars(here) == {"gathering": False}


def test_a_newcomer_hears_that_all_are_to_stop() -> None:
    told = [[None, None], ["stopped by SIGINT", None], [None, "2 minutes are over"]]
    here = SimpleNamespace(interrupted=None, timed_out=None)
    here.fellows = SimpleNamespace(told=lambda mine: [mine, *told])
    recovery._agree_on_the_end(here)  # type: ignore[arg-type]
    assert (here.interrupted, here.timed_out) == ("stopped by SIGINT", "2 minutes are over")
