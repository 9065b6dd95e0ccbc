"""Members are started, work and end, and leave nothing behind."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.cluster.health import MemberFailed
from echelon.cluster.supervisor import facts_of, launch
from echelon.cluster.workers import Member
from echelon.core.errors import Interrupted, TrainingError, UserError
from tests.cluster.shared import DEADLINE, SOON, Counters, is_alive, start, wait_for

pytestmark = pytest.mark.timeout(120)


def descriptors() -> set[tuple[str, str]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink():
            found.add((entry.name, str(entry.readlink())))
    return {(name, target) for name, target in found if not target.endswith("/fd")}


def test_the_result_of_member_0_comes_back() -> None:
    def work(member: Member) -> dict[str, Any]:
        return {"index": member.place.index, "count": member.place.count, "loss": [0.5, None]}

    assert launch(3, work, deadline=5) == {"index": 0, "count": 3, "loss": [0.5, None]}


def test_each_member_has_its_place() -> None:
    seen = Counters(3)

    def work(member: Member) -> dict[str, Any]:
        place = member.place
        assert (place.count, place.host, place.deadline) == (3, "127.0.0.1", 7.0)
        assert (place.listener is not None) == (place.index == 0)
        seen[place.index] = place.port
        return {}

    launch(3, work, deadline=7.0)
    assert len(set(seen.list())) == 1
    assert seen[0] > 0


def test_a_large_result_comes_back_whole() -> None:
    assert launch(2, lambda _: {"text": "x" * 1_000_000}, deadline=5)["text"] == "x" * 1_000_000


def test_data_loaded_before_is_shared_and_not_copied() -> None:
    data = torch.ones(20_000_000)  # 80 MB
    copied = Counters(2)

    def work(member: Member) -> dict[str, Any]:
        total = float(data.sum())
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        mine = next(line for line in lines if line.startswith("Private_Dirty:"))
        copied[member.place.index] = int(mine.split()[1]) // 1000
        return {"total": total}

    assert launch(2, work, deadline=5) == {"total": 20_000_000.0}
    assert all(megabytes < 40 for megabytes in copied.list()), copied.list()


def test_nothing_is_left_open_running_or_changed() -> None:
    def work(member: Member) -> dict[str, Any]:
        if failing and member.place.index == 1:
            raise ValueError("as planned")
        return {}

    children = Path("/proc/thread-self/children").read_text
    alive = children()
    before = descriptors(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    failing = False
    launch(3, work, deadline=5)
    failing = True
    with pytest.raises(MemberFailed, match="as planned"):
        launch(3, work, deadline=5)
    now = descriptors(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert now == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert children() == alive


def test_it_works_where_the_end_of_children_is_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert launch(2, lambda _: {"done": True}, deadline=5) == {"done": True}
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_member_holds_no_descriptor_of_others() -> None:
    seen = Counters(3)
    before = {name for name, _ in descriptors()}

    def held() -> int:
        time.sleep(0.01)
        mine = [d for d in descriptors() if d[0] not in before and "[eventpoll]" not in d[1]]
        return len(mine)

    def work(member: Member) -> dict[str, Any]:
        # The least of several looks: a thread may just be opening something for a moment.
        seen[member.place.index] = min(held() for _ in range(20))
        return {}

    launch(3, work, deadline=5)
    # Member 0: its wire, the listener, two texts, an eventfd. Others: wire, voice, eventfd.
    assert seen.list() == [5, 3, 3]


def test_a_process_that_a_member_left_running_ends_with_it() -> None:
    seen = Counters(1)

    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 1:
            seen[0] = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
        return {}

    launch(2, work, deadline=5)
    wait_for(lambda: not is_alive(seen[0]), SOON)


def test_exit_handlers_and_buffers_of_the_parent_run_once() -> None:
    script = (
        "import atexit, sys\n"
        "from echelon.cluster.supervisor import launch\n"
        "atexit.register(lambda: print('bye'))\n"
        "sys.stdout.write('hello ')\n"
        "launch(3, lambda m: {}, deadline=5)\n"
    )
    with start(script) as process:
        out, err = process.communicate(timeout=DEADLINE)
    assert (out, err) == ("hello bye\n", "")


def test_others_print_through_member_0_with_their_number(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(member: Member) -> dict[str, Any]:
        print("out of", member.place.index)
        print("err of", member.place.index, file=sys.stderr)
        os.write(2, b"native\n")
        if member.place.index == 1:
            os.write(1, b"never ended")
        return {}

    launch(2, work, deadline=5)
    captured = capfd.readouterr()
    assert captured.out == "out of 0\n"
    lines = captured.err.splitlines()
    assert [line for line in lines if line.startswith("[1] ")] == [
        "[1] out of 1",
        "[1] err of 1",
        "[1] native",
        "[1] never ended",
    ]
    assert [line for line in lines if not line.startswith("[1] ")] == ["err of 0", "native"]


def test_what_others_print_goes_where_member_0_draws() -> None:
    """A progress bar takes over `sys.stderr`, to print above itself."""

    drawing = Counters(1)

    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 1:
            wait_for(lambda: drawing[0])
            print("above the bar")
            return {}
        sys.stderr = drawn = io.StringIO()
        drawing[0] = 1
        wait_for(lambda: drawn.getvalue().endswith("\n"))
        return {"text": drawn.getvalue()}

    assert launch(2, work, deadline=5) == {"text": "[1] above the bar\n"}


def test_what_others_print_after_member_0_has_ended_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 1:
            time.sleep(0.3)
            print("x" * 200_000)  # more than a pipe holds
        return {}

    launch(2, work, deadline=5)
    assert capfd.readouterr().err == f"[1] {'x' * 200_000}\n"


def test_a_member_cannot_hang_on_the_terminal_it_does_not_own() -> None:
    assert launch(2, lambda _: {"text": os.read(0, 10).decode()}, deadline=5) == {"text": ""}


def test_one_that_does_not_end_after_member_0_is_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 1:
            time.sleep(60)
        return {"done": True}

    begin = time.monotonic()
    assert launch(2, work, deadline=0.3) == {"done": True}
    assert time.monotonic() - begin < SOON
    assert "did not end within 0.3 s of member 0" in capfd.readouterr().err


def test_facts_are_kept_when_the_run_fails() -> None:
    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 0:
            member.tell(run="digits-0003")
            member.tell(folder="runs", steps=3)
            raise RuntimeError("broken")
        time.sleep(60)
        return {}

    with pytest.raises(MemberFailed) as caught:
        launch(2, work, deadline=5)
    assert facts_of(caught.value) == {"run": "digits-0003", "folder": "runs", "steps": 3}
    assert facts_of(ValueError("of somebody else")) == {}


def test_a_result_that_is_not_plain_is_a_fault_of_member_0() -> None:
    with pytest.raises(MemberFailed, match=r"member \d of 2 .*TypeError: .* not JSON serializable"):
        launch(2, lambda _: {"model": object()}, deadline=5)


def test_no_member_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="workers = 0: at least one"):
        launch(0, lambda _: {}, deadline=5)


def test_a_fork_that_is_refused_ends_those_already_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, seen = os.fork, Counters(1)

    def fork() -> int:
        if seen[0] != 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        seen[0] = 1
        pid = real()
        seen[0] = pid or seen[0]
        return pid

    def work(_: Member) -> dict[str, Any]:
        time.sleep(60)
        return {}

    handlers = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(TrainingError, match="member 1 of 2 could not be started: Resource"):
        launch(2, work, deadline=5)
    assert not is_alive(seen[0])
    assert signal.getsignal(signal.SIGINT) is handlers


def test_interrupts_are_keyboard_interrupts() -> None:
    error = Interrupted("stopped by SIGTERM")
    assert isinstance(error, KeyboardInterrupt)
    assert str(error) == "stopped by SIGTERM"


def test_four_members_start_and_end_quickly() -> None:
    best = 9.0
    for _ in range(3):
        begin = time.monotonic()
        launch(4, lambda _: {}, deadline=5)
        best = min(best, time.monotonic() - begin)
    assert best < 2.0  # about 0.02 s on an idle machine; to import torch takes longer


def test_a_thread_in_the_way_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(20,), name="my-reader")
    thread.start()
    try:
        with pytest.raises(UserError, match=r"before other threads: my-reader still run.*torchrun"):
            launch(2, lambda _: {}, deadline=5)
    finally:
        stop.set()
        thread.join()
