"""One member fails: all end within seconds, and one message says who, where and why."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from echelon.cluster import supervisor
from echelon.cluster.health import MemberFailed
from echelon.cluster.supervisor import facts_of, launch
from echelon.cluster.workers import Member
from echelon.core.errors import (
    ConfigError,
    DataError,
    EchelonError,
    MissingExtra,
    NonFiniteError,
    PeerError,
)
from tests.cluster.shared import SOON, Counters, is_alive, wait_for

pytestmark = pytest.mark.timeout(120)

Act = Callable[[Member], None]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience with the others, where that is not what is tried."""
    monkeypatch.setattr(supervisor, "NOTICE_SECONDS", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All speak before the first is ended, however busy the machine is."""
    monkeypatch.setattr(supervisor, "NOTICE_SECONDS", 20.0)


def fail(*acts: Act, deadline: float = 5) -> tuple[EchelonError, float, list[int]]:
    """Launch one member per act: the error, how long it took, and the pids."""
    pids = Counters(len(acts))

    def work(member: Member) -> dict[str, Any]:
        member.pulse(12, "compute")
        pids[member.place.index] = os.getpid()
        wait_for(lambda: all(pids.list()))
        acts[member.place.index](member)
        return {}

    start = time.monotonic()
    with pytest.raises(EchelonError) as caught:
        launch(len(acts), work, deadline=deadline)
    seconds = time.monotonic() - start
    assert not [pid for pid in pids.list() if is_alive(pid)]
    return caught.value, seconds, pids.list()


def rest(_: Member) -> None:
    time.sleep(60)


def stuck(_: Member) -> None:
    """In C, with every signal but SIGKILL waiting."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    ctypes.PyDLL(None).sleep(60)


def bug(_: Member) -> None:
    raise RuntimeError("boom\nand more of it")


def raises(error: Exception) -> Act:
    def act(_: Member) -> None:
        raise error

    return act


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_bug_names_its_member_and_keeps_its_traceback(index: int) -> None:
    acts = [rest, rest, rest]
    acts[index] = bug
    error, seconds, pids = fail(*acts)
    assert isinstance(error, MemberFailed)
    assert str(error) == (
        f"member {index} of 3 (pid {pids[index]} on {socket.gethostname()}) "
        "failed at step 12 (compute): RuntimeError: boom"
    )
    assert error.member == index
    assert error.traceback is not None
    assert error.traceback.startswith("Traceback")
    assert "in bug" in error.traceback
    assert "child.py" not in error.traceback
    assert "In member" in error.__notes__[0]
    assert seconds < SOON


def test_a_bug_in_all_is_told_once() -> None:
    error, _, _ = fail(bug, bug, bug)
    assert isinstance(error, MemberFailed)
    assert str(error).count("boom") == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "given",
    [
        DataError("train.csv, line 3: 'x' is not a number"),
        NonFiniteError("step 4: 'layer1' is not finite"),
        ConfigError("batch_size = 0", ("optimizer", "lr")),
        MissingExtra("tracking", "wandb"),
    ],
)
def test_an_error_that_was_meant_comes_out_as_it_was(given: EchelonError) -> None:
    for acts in ([rest, raises(given)], [raises(given), raises(given)]):
        error, seconds, _ = fail(*acts)
        assert type(error) is type(given)
        assert str(error) == str(given)
        assert {k: v for k, v in vars(error).items() if k not in ("facts", "steps")} == vars(given)
        assert seconds < SOON


@pytest.mark.usefixtures("quick")
def test_an_error_class_that_only_the_member_knows_comes_as_its_parent() -> None:
    def act(_: Member) -> None:
        class Strange(DataError):
            def __init__(self) -> None:
                super().__init__("strange data")
                self.detail = object()

        raise Strange

    error, _, _ = fail(rest, act)
    assert type(error) is DataError
    assert str(error) == "strange data"


@pytest.mark.usefixtures("quick")
def test_an_error_without_text_is_its_name() -> None:
    error, _, _ = fail(raises(AssertionError()), rest)
    assert str(error).endswith("AssertionError")


@pytest.mark.usefixtures("patient")
def test_the_cause_is_told_even_if_its_consequence_comes_first() -> None:
    def late(member: Member) -> None:
        time.sleep(0.3)
        bug(member)

    error, _, _ = fail(raises(PeerError("member 1 (pid 1) has ended")), late)
    assert isinstance(error, MemberFailed)
    assert error.member == 1
    assert "boom" in str(error)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("other", [rest, stuck, raises(PeerError("member 1 has ended"))])
def test_a_killed_member_is_named(other: Act) -> None:
    def killed(_: Member) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    error, seconds, pids = fail(other, killed)
    assert str(error) == (
        f"member 1 of 2 (pid {pids[1]} on {socket.gethostname()}) was killed by signal 9 (SIGKILL) "
        "at step 12 (compute): perhaps out of memory (look at dmesg)"
    )
    assert seconds < SOON


@pytest.mark.usefixtures("quick")
def test_a_crash_in_native_code_is_named() -> None:
    def crash(_: Member) -> None:
        import faulthandler

        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)

    error, _, _ = fail(rest, crash)
    assert "killed by signal 11 (SIGSEGV) at step 12 (compute): a crash in native" in str(error)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_without_a_word_is_named(code: int) -> None:
    error, seconds, _ = fail(rest, lambda _: os._exit(code))
    text = f"ended without a word at step 12 (compute): exit code {code}"
    assert str(error).endswith(text)
    assert seconds < SOON


@pytest.mark.usefixtures("quick")
def test_an_unknown_signal_has_its_number() -> None:
    error, _, _ = fail(rest, lambda _: os.kill(os.getpid(), 40))
    assert "killed by signal 40 at step" in str(error)


@pytest.mark.usefixtures("quick")
def test_sys_exit_is_a_failure_with_a_traceback() -> None:
    error, _, _ = fail(lambda _: exit(0), rest)
    assert isinstance(error, MemberFailed)
    assert "SystemExit" in str(error)


def test_a_failure_before_the_first_step_says_so() -> None:
    def work(_: Member) -> dict[str, Any]:
        raise ValueError("no data")

    with pytest.raises(MemberFailed, match="failed before its first step: ValueError: no data"):
        launch(2, work, deadline=5)


def test_members_blocked_in_c_are_ended() -> None:
    error, seconds, _ = fail(stuck, bug, stuck)
    assert isinstance(error, MemberFailed)
    assert error.member == 1
    assert 2 < seconds < SOON


def test_members_blocked_in_a_collective_are_ended() -> None:
    def act(member: Member) -> None:
        place = member.place
        store = TCPStore(
            place.host,
            place.port,
            place.count,
            is_master=place.index == 0,
            timeout=timedelta(seconds=20),
            master_listen_fd=place.listener,
        )
        dist.init_process_group("gloo", store=store, rank=place.index, world_size=place.count)
        if place.index == 2:
            time.sleep(0.1)
            bug(member)
        dist.recv(torch.zeros(1), src=1 - place.index)  # both wait for each other

    error, seconds, _ = fail(act, act, act)
    assert isinstance(error, MemberFailed)
    assert error.member == 2
    assert seconds < SOON


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("text", ["member 1 (pid 7) does not answer", "somebody is missing"])
def test_a_stopped_member_is_named_when_the_others_miss_it(text: str) -> None:
    silent = Counters(1)

    def stopped(member: Member) -> None:
        member.pulse(11, "all-reduce")
        silent[0] = 1
        os.kill(os.getpid(), signal.SIGSTOP)

    def missing(member: Member) -> None:
        member.tell(run="digits-0001")
        wait_for(lambda: silent[0])
        time.sleep(1.0)  # its deadline
        raise PeerError(text)

    error, seconds, pids = fail(missing, stopped, missing)
    assert isinstance(error, MemberFailed)
    assert error.member == 1
    who = re.escape(f"member 1 of 3 (pid {pids[1]} on {socket.gethostname()})")
    assert re.fullmatch(
        rf"{who} gave its last sign of life [1-9]\d*\.\d s before it was missed, "
        rf"at step 11 \(all-reduce\); member [02]: {re.escape(text)}",
        str(error),
    )
    assert facts_of(error) == {"run": "digits-0001"}
    assert seconds < 1 + SOON


@pytest.mark.usefixtures("patient")
def test_if_all_miss_each_other_the_one_furthest_behind_is_named() -> None:
    def behind(member: Member) -> None:
        member.pulse(9, "evaluate")
        raise PeerError("member 0 does not answer")

    def ahead(_: Member) -> None:
        time.sleep(0.3)
        raise PeerError("member 1 does not answer")

    error, _, _ = fail(ahead, behind)
    assert isinstance(error, MemberFailed)
    assert error.member == 1
    assert "at step 9 (evaluate)" in str(error)


def test_one_that_misses_member_0_when_that_is_done_does_not_spoil_the_result() -> None:
    def work(member: Member) -> dict[str, Any]:
        if member.place.index == 1:
            time.sleep(0.1)
            raise PeerError("member 0 has ended")
        return {"done": True}

    assert launch(2, work, deadline=5) == {"done": True}
