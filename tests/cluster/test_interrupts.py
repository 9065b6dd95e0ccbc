"""Ctrl-C and SIGTERM reach each member once; no process outlives the supervisor."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from echelon.cluster import supervisor, workers
from echelon.cluster.health import MemberFailed
from echelon.cluster.supervisor import facts_of, launch
from echelon.cluster.workers import Member, Pipes, RelayThread
from echelon.core.errors import Interrupted, PeerError
from echelon.loop.interrupt import SAME_SECONDS, on_interrupt
from tests.cluster.shared import DEADLINE, SOON, Counters, is_alive, start, wait_for
from tests.cluster.test_failures import stuck

pytestmark = pytest.mark.timeout(120)

MEMBERS = 3


class Crowd:
    """Members that say when they are ready and count the signals they get."""

    def __init__(self) -> None:
        self.ready = Counters(MEMBERS)
        self.interrupts = Counters(MEMBERS)
        self.terminations = Counters(MEMBERS)

    def listen(self, member: Member) -> None:
        """Count signals from now on; all are ready when this returns."""
        index = member.place.index

        def count(number: int, _: object) -> None:
            counters = self.interrupts if number == signal.SIGINT else self.terminations
            counters[index] += 1

        signal.signal(signal.SIGINT, count)
        signal.signal(signal.SIGTERM, count)
        self.gather(index)

    def gather(self, index: int) -> None:
        self.ready[index] = os.getpid()
        wait_for(lambda: all(self.ready.list()))

    def gone(self) -> bool:
        return not [pid for pid in self.ready.list() if is_alive(pid)]


def press(number: int = signal.SIGINT) -> None:
    """What a terminal does to the supervisor, from within a member."""
    os.kill(os.getppid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_reaches_each_member_once(number: signal.Signals) -> None:
    crowd = Crowd()
    counters = crowd.interrupts if number == signal.SIGINT else crowd.terminations

    def work(member: Member) -> dict[str, Any]:
        crowd.listen(member)
        if member.place.index == 1:
            press(number)
        wait_for(lambda: all(counters.list()))
        time.sleep(0.2)  # for one too many
        return {"status": "stopped"}

    assert launch(MEMBERS, work, deadline=5) == {"status": "stopped"}
    assert counters.list() == [1, 1, 1]
    assert sum(crowd.interrupts.list()) + sum(crowd.terminations.list()) == MEMBERS


def test_a_signal_to_the_process_and_its_group_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `timeout` sends it."""
    monkeypatch.setattr(supervisor, "SAME_SECONDS", 10.0)  # a busy machine may come between them
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        crowd.listen(member)
        if member.place.index == 1:
            press(signal.SIGTERM)
            press(signal.SIGTERM)
        wait_for(lambda: all(crowd.terminations.list()))
        time.sleep(0.2)
        return {}

    launch(MEMBERS, work, deadline=5)
    assert crowd.terminations.list() == [1, 1, 1]


@pytest.mark.usefixtures("brief")
def test_the_end_of_one_that_was_not_ready_ends_the_others() -> None:
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 0:
            signal.signal(signal.SIGTERM, lambda *_: None)
        crowd.gather(member.place.index)
        if member.place.index == 0:
            press(signal.SIGTERM)
        time.sleep(60)
        return {}

    begin = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"):
        launch(MEMBERS, work, deadline=5)
    assert time.monotonic() - begin < SOON
    assert crowd.gone()


def test_members_stop_with_the_handlers_of_the_loop() -> None:
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        asked: list[str] = []
        with on_interrupt(asked.append):
            crowd.gather(member.place.index)
            if member.place.index == 0:
                press()
            wait_for(lambda: asked)
        return {"reason": asked}

    assert launch(MEMBERS, work, deadline=5) == {"reason": ["SIGINT"]}


def twice(crowd: Crowd, act: Callable[[Member], None]) -> float:
    """Press Ctrl-C twice; the first is taken note of, `act` says what members do then."""
    pressed = Counters(1)

    def work(member: Member) -> dict[str, Any]:
        asked: list[str] = []
        with on_interrupt(asked.append):
            member.tell(run="digits-0001")
            crowd.gather(member.place.index)
            if member.place.index == 0:
                press()
            wait_for(lambda: asked)
            crowd.interrupts[member.place.index] = 1
            wait_for(lambda: all(crowd.interrupts.list()))
            if member.place.index == 0 and not pressed[0]:
                pressed[0] = 1
                time.sleep(SAME_SECONDS)
                press()
            act(member)
        return {}

    begin = time.monotonic()
    with pytest.raises(Interrupted, match="stopped by SIGINT") as caught:
        launch(MEMBERS, work, deadline=5)
    assert facts_of(caught.value) == {"run": "digits-0001"}
    return time.monotonic() - begin


def test_the_second_one_ends_them_at_once() -> None:
    crowd = Crowd()
    assert twice(crowd, lambda _: time.sleep(60)) < SOON
    assert crowd.gone()


def test_the_second_one_ends_also_those_blocked_in_c() -> None:
    crowd = Crowd()
    assert twice(crowd, stuck) < SOON
    assert crowd.gone()


def test_the_third_one_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "IMPATIENT_SECONDS", 60.0)
    crowd = Crowd()

    def act(member: Member) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if member.place.index == 0:
            while True:
                time.sleep(2 * SAME_SECONDS)
                press()
        time.sleep(60)

    assert twice(crowd, act) < SOON
    assert crowd.gone()


def test_a_member_that_is_not_ready_yet_ends_and_the_others_with_it() -> None:
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        crowd.gather(member.place.index)
        if member.place.index == 0:
            press()
            with on_interrupt(lambda _: None):
                time.sleep(0.2)
                raise PeerError("member 1 has ended")
        time.sleep(60)
        return {}

    with pytest.raises(KeyboardInterrupt):
        launch(MEMBERS, work, deadline=5)
    assert crowd.gone()


def test_a_signal_waits_until_a_new_member_can_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = workers._settle

    def slowly(index: int, pipes: Pipes, supervisor: int) -> RelayThread:
        if index == 1:
            time.sleep(0.3)  # still with the handlers of the supervisor
        return settle(index, pipes, supervisor)

    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            press()
        time.sleep(60)
        return {}

    monkeypatch.setattr(workers, "_settle", slowly)
    with pytest.raises(Interrupted):
        launch(2, work, deadline=5)


def test_sigterm_before_anybody_listens_is_an_interruption() -> None:
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        crowd.gather(member.place.index)
        if member.place.index == 0:
            press(signal.SIGTERM)
        time.sleep(60)
        return {}

    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        launch(MEMBERS, work, deadline=5)
    assert crowd.gone()


def test_a_bug_while_stopping_is_not_hidden() -> None:
    crowd = Crowd()

    def work(member: Member) -> dict[str, Any]:
        crowd.listen(member)
        if member.place.index == 0:
            press()
        wait_for(lambda: crowd.interrupts[member.place.index])
        raise OSError("disk full")

    with pytest.raises(MemberFailed, match="disk full"):
        launch(MEMBERS, work, deadline=5)


SCRIPT = """
import os, sys, time
from echelon.cluster.supervisor import launch
from echelon.loop.interrupt import SAME_SECONDS, on_interrupt

def work(member):
    asked = []
    with on_interrupt(asked.append):
        os.write(1, b"ready %d\\n" % os.getpid())
        end = time.monotonic() + 60
        while not asked and time.monotonic() < end:
            time.sleep(0.01)
    time.sleep(0.2)
    return {"asked": asked}

print(launch(3, work, deadline=5), flush=True)
"""


def test_no_member_outlives_a_killed_supervisor() -> None:
    with start(SCRIPT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        lines = [first, process.stderr.readline(), process.stderr.readline()]
        pids = [int(line.split()[-1]) for line in lines]
        assert all(map(is_alive, pids))
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, pids)), SOON)


def test_a_terminals_ctrl_c_reaches_the_members_through_the_supervisor_alone() -> None:
    """A real terminal: the key goes to its foreground group, and members may write to it."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY)\n{SCRIPT}",
        ],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        text = _read_until(master, lambda text: text.count("ready") == 3)
        os.write(master, b"\x03")
        text += _read_until(master, lambda text: "asked" in text)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert "{'asked': ['SIGINT']}" in text
    assert "Traceback" not in text
    assert text.count("[1] ready") == text.count("[2] ready") == 1


def _read_until(descriptor: int, enough: Callable[[str], bool]) -> str:
    os.set_blocking(descriptor, False)
    text = ""
    deadline = time.monotonic() + DEADLINE
    while not enough(text):
        assert time.monotonic() < deadline, text
        try:
            text += os.read(descriptor, 65536).decode()
        except BlockingIOError:
            time.sleep(0.01)
    return text
