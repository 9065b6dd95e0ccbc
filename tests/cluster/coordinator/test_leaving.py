"""A member that leaves has reported everything, and knows that it was journaled."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from echelon.cluster.coordinator.session import Backlog, Item
from tests.cluster.shared import wait_for

from .real import Coordinator, Trainer, arrive_together
from .scene import Scene


def test_a_leave_does_not_overtake_the_records() -> None:
    backlog = Backlog()
    backlog.report(1, [[0, 0, 64, 1, 1]])
    backlog.put(Item("rolled_back", {"version": 0, "why": "x"}))
    assert [frame["kind"] for frame in backlog.frames(records=False)] == ["rolled_back"]
    backlog.put(Item("leave", {"why": "done", "fatal": False, "over": True}))
    assert [frame["kind"] for frame in backlog.frames(records=False)] == ["commits", "leave"]


@pytest.mark.timeout(120)
def test_a_leave_that_waits_for_the_coordinator_is_over_when_it_is_heard(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator, Trainer(coordinator, 0) as zero:
        arrive_together(zero)
        assert coordinator.pid is not None
        os.kill(coordinator.pid, signal.SIGSTOP)
        zero.liaison.report([[0, 0, 64, 1, 1]])
        leaving = threading.Thread(target=zero.liaison.leave, args=("done", False, True))
        leaving.start()
        time.sleep(1.0)  # for beats to follow it
        os.kill(coordinator.pid, signal.SIGCONT)
        leaving.join(5.0)
        assert not leaving.is_alive(), "it waits for somebody who has hung up"
        assert coordinator.ended() == 0
        assert [entry["last"] for entry in coordinator.written("committed")] == [1]
        assert coordinator.written("finished")[0]["status"] == "done"


def test_an_error_ends_the_run_for_all_and_their_last_words_are_heard() -> None:
    scene = Scene()
    zero, one, two = scene.together(3)
    scene.commit(zero, (0, 0, 64, 1, 1))
    scene.say(one, "leave", why="ValueError: no", fatal=True)
    for member in (zero, two):
        (end,) = scene.told(member, "end")
        assert (end["why"].endswith("ValueError: no"), end["hears"]) == (True, True)
    assert scene.written("over")[-1]["status"] == "failed"
    scene.commit(zero, (0, 64, 128, 2, 2))
    scene.restart()
    zero, two = (scene.hello(10 + n, member=n, generation=1) for n in (0, 2))
    assert len(scene.told(two, "end")) == 2, "told again: it may not have heard"
    scene.arrive(two, 2, generation=1)
    assert scene.told(two, "end")[-1]["hears"]
    scene.say(two, "leave", why="RunEnded", fatal=False)
    assert not scene.written("finished")
    scene.say(zero, "leave", why="RunEnded", fatal=False)
    (finished,) = scene.written("finished")
    assert (finished["status"], finished["version"]) == ("failed", 2)
    assert finished["why"].endswith("ValueError: no")
    assert [entry["how"] for entry in scene.written("lost")] == ["error", "left", "left"]


@pytest.mark.timeout(120)
def test_whoever_hears_of_an_error_can_still_tell(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1) as one,
    ):
        arrive_together(zero, one)
        one.liaison.leave("ValueError: no", fatal=True)
        wait_for(lambda: zero.ends)
        assert zero.liaison.is_heard
        zero.liaison.report([[0, 0, 64, 1, 1]])
        wait_for(lambda: zero.liaison.recorded == 1)
        zero.liaison.leave("RunEnded: ValueError: no", fatal=True)
        assert coordinator.ended() == 0
        (finished,) = coordinator.written("finished")
        assert (finished["status"], finished["version"]) == ("failed", 1)
        assert [entry["how"] for entry in coordinator.written("lost")] == ["error", "left"]
