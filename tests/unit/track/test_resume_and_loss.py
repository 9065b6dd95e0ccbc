"""Runs whose process died, and runs that go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from echelon.core.errors import RunError
from echelon.track import Point, Store
from echelon.track.records import Process, born, this_process
from echelon.track.store import connected

_HOLDER = """
import sys, time
from echelon.track import Store
print(Store(sys.argv[1]).create("digits", {}, {}), flush=True)
time.sleep(60)
"""


def _hold(store: Store) -> tuple[subprocess.Popen[str], str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(store.folder)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, holder.stdout.readline().strip()


def _end(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


def test_a_killed_run_is_lost_and_can_be_resumed(store: Store) -> None:
    holder, run = _hold(store)
    try:
        assert store.run(run).status == "running"
        with pytest.raises(RunError, match=rf"still running \(process {holder.pid} on"):
            store.resume(run)
    finally:
        _end(holder)
    assert store.run(run).status == "lost"
    assert store.resume(run).status == "running"
    assert store.run(run).process == this_process()


def test_one_that_another_process_has_claimed_for_us_stays_its_own(store: Store) -> None:
    holder, run = _hold(store)
    try:
        store.add_points(run, [Point(s, "train/loss", 1.0, 0.0) for s in (10, 20)])
        assert store.resume(run, 10, claimed=True).process.pid == holder.pid
        assert store.series(run, "train/loss").steps == [10]
    finally:
        _end(holder)


def test_a_process_is_gone_before_anybody_reaped_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = Process(socket.gethostname(), child.pid, born(child.pid))
    assert not process.is_gone
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone
    child.wait()
    assert process.is_gone


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    me = this_process()
    assert not me.is_gone
    assert me._replace(born="another boot/1").is_gone


def test_a_process_of_another_machine_is_never_said_to_be_gone() -> None:
    assert not Process("elsewhere", 2**22 - 1, "x").is_gone


def test_resume_drops_what_will_come_anew(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.add_points(run, [Point(s, "train/loss", 1.0, 0.0) for s in (10, 20, 30)])
    store.finish(run, "stopped", {"steps": 30})
    resumed = store.resume(run, step=20)
    assert store.series(run, "train/loss").steps == [10, 20]
    assert (resumed.status, resumed.steps, resumed.finished) == ("running", 20, None)


def test_resume_without_a_step_keeps_every_point(trained: Callable[..., str], store: Store) -> None:
    run = trained()
    assert store.resume(run).step == 200
    assert len(store.series(run, "train/loss").steps) == 100


def test_a_resumed_run_is_the_last_one(store: Store) -> None:
    first = store.create("digits", {}, {})
    store.create("digits", {}, {})
    store.finish(first, "stopped", {})
    store.resume(first)
    assert store.run("last").id == first


@pytest.mark.parametrize(("age", "refused"), [(1.0, True), (3600.0, False)])
def test_a_run_of_another_machine_is_refused_while_it_gives_signs_of_life(
    store: Store, age: float, refused: bool
) -> None:
    run = store.create("digits", {}, {})
    with connected(store.path) as file:
        file.execute("UPDATE runs SET host = 'elsewhere', seen = seen - ?", (age,))
    if refused:
        with pytest.raises(RunError, match="on elsewhere"):
            store.resume(run)
    else:
        assert store.resume(run).process == this_process()


def test_an_unknown_run_cannot_be_resumed(store: Store) -> None:
    with pytest.raises(RunError, match="there are no runs"):
        store.resume("digits-0001")


def test_a_run_that_goes_on_under_another_strategy_is_listed_with_it(store: Store) -> None:
    run = store.create("digits", {"strategy": "pipeline"}, {"strategy": "pipeline"})
    store.reconfigure(run, {"strategy": "single", "epochs": 3})
    assert store.run(run).strategy == "single"
    store.reconfigure(run, {"epochs": 4})
    assert store.run(run).strategy == "single", "where nothing is said, nothing changes"
