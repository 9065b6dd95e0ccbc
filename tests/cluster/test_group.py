"""Launched members form a group and notice a lost peer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from echelon.cluster.health import MemberFailed
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.comm.group import Group
from tests.cluster.shared import SOON

pytestmark = pytest.mark.timeout(120)

STEPS = 50


def training(hit: Callable[[], None] | None = None) -> Callable[[Member], dict[str, Any]]:
    """Sums, step after step; something hits member 1 in the middle."""

    def work(member: Member) -> dict[str, Any]:
        with closing(Group(member.place)) as group:
            together = group.collective()
            total = 0.0
            for step in range(STEPS):
                member.pulse(step, "sum")
                if step == STEPS // 2 and group.index == 1 and hit is not None:
                    hit()
                total += together.sum([float(group.index)])[0]
            return {"total": total}

    return work


def test_members_meet_and_work_together() -> None:
    assert launch(3, training(), deadline=30) == {"total": 3.0 * STEPS}


def test_a_bug_is_told_and_not_that_others_missed_its_member() -> None:
    def hit() -> None:
        raise ZeroDivisionError("oh")

    begin = time.monotonic()
    with pytest.raises(MemberFailed, match=r"member 1 .*at step 25 \(sum\): ZeroDivisionError: oh"):
        launch(3, training(hit), deadline=30)
    assert time.monotonic() - begin < SOON


def test_a_killed_one_is_told_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(MemberFailed, match=r"member 1 .*SIGKILL\) at step 25 \(sum\): perhaps"):
        launch(3, training(lambda: os.kill(os.getpid(), signal.SIGKILL)), deadline=30)
    assert time.monotonic() - begin < SOON


@pytest.mark.usefixtures("brief")
def test_a_stopped_one_is_told_after_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(MemberFailed, match=r"member 1 .*last sign of life \d+\.\d s .*at step 25"):
        launch(3, training(lambda: os.kill(os.getpid(), signal.SIGSTOP)), deadline=2.0)
    assert 2 < time.monotonic() - begin < 2 + SOON
