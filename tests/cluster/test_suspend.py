"""Ctrl-Z stops members and supervisor and all continue; a closed terminal ends them in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.loop.interrupt import on_interrupt
from tests.cluster.shared import Counters, start, wait_for

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, sys, time
from echelon.cluster.supervisor import launch

def work(member):
    helper = os.fork()  # what a member starts is stopped with it
    if helper == 0:
        time.sleep(60)
        os._exit(0)
    os.write(2, b"%d %d\\n" % (os.getpid(), helper))
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    return {"done": True}

print(launch(2, work, deadline=5), flush=True)
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_ctrl_z_stops_all_and_fg_lets_all_go_on(tmp_path: Path) -> None:
    # A group of its own in this session, as a shell's job: nobody would wake an orphan.
    with start(SCRIPT, str(tmp_path / "end"), process_group=0) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline().split() for _ in range(2)]
        pids = [process.pid, *(int(line[-1]) for line in lines), *(int(line[-2]) for line in lines)]
        try:
            for _ in range(2):
                os.kill(process.pid, signal.SIGTSTP)
                wait_for(lambda: all(state(pid) == "T" for pid in pids))
                os.kill(process.pid, signal.SIGCONT)
                wait_for(lambda: not any(state(pid) == "T" for pid in pids))
            (tmp_path / "end").touch()
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == "{'done': True}\n"


def asked_by(*numbers: signal.Signals) -> dict[str, Any]:
    """What members are asked when these signals come to the supervisor."""
    ready = Counters(2)

    def work(member: Member) -> dict[str, Any]:
        asked: list[str] = []
        with on_interrupt(asked.append):
            ready[member.place.index] = 1
            wait_for(lambda: all(ready.list()))
            if member.place.index == 0:
                for number in numbers:
                    os.kill(os.getppid(), number)
            wait_for(lambda: asked)
        return {"asked": asked}

    return launch(2, work, deadline=5)


def test_a_closed_terminal_asks_for_an_end() -> None:
    assert asked_by(signal.SIGHUP) == {"asked": ["SIGHUP"]}


def test_under_nohup_it_does_not() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asked_by(signal.SIGHUP, signal.SIGTERM) == {"asked": ["SIGTERM"]}
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
