"""Kill the coordinator, kill, freeze or cut off a member: with real processes and sockets."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from echelon.cluster.coordinator import Reporter
from echelon.core.errors import PeerError
from echelon.core.types import Lease
from tests.cluster.coordinator.real import (
    DEADLINE,
    Coordinator,
    Trainer,
    arrive_together,
    fork,
    reap,
)
from tests.cluster.shared import wait_for

pytestmark = pytest.mark.timeout(180)


def test_a_killed_coordinator_is_replaced_and_members_do_not_notice(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1) as one,
    ):
        first = arrive_together(zero, one)
        assert [generation.index for generation in first] == [0, 1]
        assert first[0].members == first[1].members
        assert zero.liaison.run == {"job": "digits"}
        for trainer in (zero, one):
            trainer.liaison.report([(0, 0, 10, 1, 1)])
        wait_for(lambda: coordinator.written("committed"))
        assert coordinator.kill() == -signal.SIGKILL
        for trainer in (zero, one):
            trainer.liaison.report([(0, 10, 30, 2, 3)])
        held = threading.Thread(target=lambda: leased.append(one.liaison.lease(5, 100)))
        leased: list[tuple[list[Lease], int]] = []
        held.start()
        time.sleep(0.2)
        coordinator.start()
        held.join(DEADLINE)
        assert leased == [([Lease(5, 0, 100)], 1000)]
        wait_for(lambda: len(coordinator.written("committed")) == 2)
        assert [e["again"] for e in coordinator.written("coordinator")] == [False, True]
        assert (zero.orders, one.orders, zero.ends) == ([], [], [])
        assert not coordinator.written("lost")
        assert len(coordinator.written("joined")) == 2

        (second, _) = arrive_together(zero, one, generation=1, progress=(3,))
        assert (second.number, second.recorded) == (2, 3)
        zero.liaison.report([(5, 0, 40, 4, 4, 1)])
        zero.liaison.leave("done", over=True)
        one.liaison.leave("done", over=True)
        assert coordinator.ended() == 0
        assert coordinator.written("committed")[-1]["member"] == 1
        assert coordinator.written("finished")[0]["status"] == "done"


def test_a_coordinator_killed_while_members_regroup_is_replaced(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1) as one,
    ):
        arrive_together(zero, one)
        found = []
        waiting = threading.Thread(
            target=lambda: found.append(zero.liaison.arrive(1, [4], "a peer is gone", suspect=1))
        )
        waiting.start()
        wait_for(lambda: one.orders)
        assert one.orders[0][1] is True
        coordinator.kill()
        coordinator.start()
        second = one.liaison.arrive(1, [3], "ordered")
        waiting.join(DEADLINE)
        assert found == [
            type(second)(
                number=2,
                index=0,
                members=second.members,
                store=("127.0.0.1", 7),
                name=second.name,
                source=0,
                behind=(1,),
                recorded=0,
            )
        ]


def test_a_killed_member_is_missed_at_once_and_its_last_updates_are_not_lost(
    tmp_path: Path,
) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 1) as survivor,
        ExitStack() as stack,
    ):

        def lead() -> None:
            with Trainer(coordinator, 0) as leader:
                leader.liaison.arrive(0, [0], "start")
                time.sleep(DEADLINE)

        pid = fork(lead)
        stack.callback(lambda: _end(pid))
        generation = survivor.liaison.arrive(0, [0], "start")
        assert generation.index == 1
        survivor.liaison.report([(0, 0, 10, 1, 1)])
        survivor.liaison.report([(0, 10, 20, 2, 2)])
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: survivor.orders)
        assert time.monotonic() - killed < 10  # some milliseconds on an idle machine
        (why, urgent) = survivor.orders[0]
        assert urgent
        assert why == f"{generation.members[0]} is lost: its process has ended"
        alone = survivor.liaison.arrive(1, [2], "ordered")
        assert (alone.number, alone.index, alone.recorded) == (2, 0, 2)
        assert [m.id for m in alone.members] == [1]
        survivor.liaison.report([(0, 20, 30, 3, 3)])
        wait_for(lambda: coordinator.written("recovered"))
        assert coordinator.written("lost")[0]["how"] == "killed"


def test_a_frozen_member_is_expelled_and_comes_back_as_a_newcomer(tmp_path: Path) -> None:
    diary = tmp_path / "diary"

    with Coordinator(tmp_path, expected=2) as coordinator, ExitStack() as stack:

        def freeze() -> None:
            with Trainer(coordinator, 1) as trainer, diary.open("w") as file:
                number, progress = 0, 0
                while True:
                    generation = trainer.liaison.arrive(number, [progress], "as told")
                    number, progress = generation.number, 7
                    line = {"id": trainer.liaison.member, "number": number}
                    print(json.dumps(line), file=file, flush=True)
                    wait_for(lambda: trainer.orders)
                    trainer.orders.clear()

        zero = stack.enter_context(Trainer(coordinator, 0))
        pid = fork(freeze)
        stack.callback(lambda: _end(pid))
        zero.liaison.arrive(0, [0], "start")
        wait_for(diary.read_text)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: zero.orders)
        assert "its process is stopped" in zero.orders[0][0]
        alone = zero.liaison.arrive(1, [7], "ordered")
        assert [m.id for m in alone.members] == [0]
        zero.orders.clear()
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: zero.orders)
        assert zero.orders[0][1] is False, "a newcomer can wait"
        both = zero.liaison.arrive(2, [8], "ordered")
        assert [m.id for m in both.members] == [0, 2]
        assert (both.source, both.behind) == (0, (1,))
        wait_for(lambda: diary.read_text().count("\n") == 2)
        lines = [json.loads(line) for line in diary.read_text().splitlines()]
        assert lines == [{"id": 1, "number": 1}, {"id": 2, "number": 3}]
        assert [entry["how"] for entry in coordinator.written("lost")] == ["frozen"]


def test_a_member_that_is_cut_off_is_expelled_and_comes_back(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1, host="another") as one,
    ):
        arrive_together(zero, one)
        reporter = Reporter(coordinator.address, coordinator.key)
        try:
            wait_for(lambda: reporter.drop(1, DEADLINE))
            wait_for(lambda: zero.orders)
            assert "no sign of life" in zero.orders[0][0]
            assert zero.liaison.arrive(1, [1], "ordered").index == 0
            assert one.orders == [], "it cannot know"
            reporter.drop(1, 0.0)
            wait_for(lambda: one.orders)
            assert one.orders[0][0].startswith("expelled: it gave no sign of life")
        finally:
            reporter.close()
        zero.orders.clear()
        found = []
        back = threading.Thread(target=lambda: found.append(one.liaison.arrive(1, [1], "expelled")))
        back.start()
        wait_for(lambda: zero.orders)
        again = zero.liaison.arrive(2, [2], "ordered")
        back.join(DEADLINE)
        assert [m.id for m in again.members] == [0, 2]
        assert (found[0].index, one.liaison.member) == (1, 2)


def test_a_supervisor_tells_of_a_child_that_never_said_hello(tmp_path: Path) -> None:
    with Coordinator(tmp_path, expected=2) as coordinator, Trainer(coordinator, 0) as zero:
        reporter = Reporter(coordinator.address, coordinator.key)
        try:
            coordinator.kill()
            assert reporter.gone(os.getppid(), -9) is False
            coordinator.start()
            wait_for(reporter.flush)
        finally:
            reporter.close()
        assert len(zero.liaison.arrive(0, [0], "start").members) == 1


def test_a_coordinator_that_stays_away_ends_the_run_for_its_members(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator, Trainer(coordinator, 0, deadline=2.0) as zero:
        zero.liaison.arrive(0, [0], "start")
        coordinator.kill()
        coordinator.listener.close()
        with pytest.raises(
            PeerError, match=r"ended: the coordinator at 127.0.0.1:\d+ could not|no word"
        ):
            zero.liaison.arrive(1, [1], "for whatever reason")
        wait_for(lambda: zero.ends)
        assert "could not be reached for 2 s" in zero.ends[0]
        zero.liaison.leave("done", over=True)
        zero.liaison.leave("done", over=True)
        assert len(zero.ends) == 1


def test_a_fatal_error_of_one_ends_the_run_for_the_others(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1) as one,
    ):
        arrive_together(zero, one)
        one.liaison.leave("the loss is\nnot finite", fatal=True)
        wait_for(lambda: zero.ends)
        assert zero.ends[0].endswith("the loss is not finite")
        assert one.ends == []
        with pytest.raises(
            PeerError, match=r"the run has ended: member 1 .*: the loss is not finite"
        ):
            zero.liaison.arrive(1, [1], "x")
        zero.liaison.close()
        assert coordinator.ended() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_ends_the_liaison_and_says_so(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator, Trainer(coordinator, 0) as zero:
        zero.liaison.arrive(0, [0], "start")
        zero.orders = None  # type: ignore[assignment]
        with Trainer(coordinator) as new:
            thread = threading.Thread(target=_arrive_in_vain, args=(new,))
            thread.start()
            wait_for(lambda: zero.ends)
            assert "the liaison broke down: AttributeError" in zero.ends[0]
            with pytest.raises(PeerError, match="broke down"):
                zero.liaison.arrive(1, [1], "x")
            new.liaison.close()
            thread.join(DEADLINE)


def test_sigterm_ends_a_coordinator_and_the_run_can_go_on_with_another(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator, Trainer(coordinator, 0) as zero:
        zero.liaison.arrive(0, [0], "start")
        assert coordinator.pid is not None
        os.kill(coordinator.pid, signal.SIGINT)  # for the supervisor to deal with
        assert coordinator.kill(signal.SIGTERM) == 0
        assert not coordinator.written("finished")
        coordinator.start()
        zero.liaison.report([(0, 0, 10, 1, 1)])
        wait_for(lambda: coordinator.written("committed"))


def test_a_process_forked_by_a_member_does_not_hold_its_connection(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator, ExitStack() as stack:
        zero = stack.enter_context(Trainer(coordinator, 0, host="another"))
        zero.liaison.arrive(0, [0], "start")
        pid = fork(lambda: time.sleep(DEADLINE))
        stack.callback(lambda: _end(pid))
        zero.liaison.close()
        wait_for(lambda: coordinator.written("lost"))
        assert "its connection broke" in coordinator.written("lost")[0]["why"]


def _arrive_in_vain(trainer: Trainer) -> None:
    with suppress(PeerError):
        trainer.liaison.arrive(0, [0], "to take part")


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    reap(pid)
