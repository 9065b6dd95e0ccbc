"""A member that leaves has told all it had to tell, and knows that it was heard."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from echelon.cluster.coordinator.backlog import Backlog, Item

from .real import Coordinator, Trainer, arrive_together


def test_a_leave_does_not_overtake_the_records() -> None:
    backlog = Backlog()
    backlog.report(1, [[0, 0, 64, 1, 1]])
    backlog.put(Item("told", {"text": "well"}))
    assert [frame["kind"] for frame in backlog.frames(records=False)] == ["told"]
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
