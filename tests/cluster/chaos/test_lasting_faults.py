"""Faults that last for a while, injected into real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.checkpoint import Shelf
from echelon.cluster.chaos.faults import Frozen, FullDisk, Handle, Slowed
from echelon.cluster.chaos.plan import Fault
from echelon.cluster.chaos.view import Deed
from echelon.cluster.coordinator.membership import look
from tests.cluster.shared import wait_for

pytestmark = pytest.mark.timeout(120)

# Appends to a file as long as it is let, and says how that went.
WRITER = """
import sys
for line in sys.stdin:
    with open(sys.argv[1], "ab") as file:
        try:
            file.write(bytes(1000)); file.flush()
            print("written", flush=True)
        except OSError as error:
            print(error.errno, flush=True)
            file.raw.close()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, text=True) as found:
        yield found
        found.kill()


def is_stopped(pid: int) -> bool:
    sight = look(pid)
    return sight is not None and sight.stopped


def test_what_is_frozen_stands_still_for_so_long(process: subprocess.Popen[str]) -> None:
    frozen = Frozen(Handle(process.pid), [3], 0.05)
    wait_for(lambda: is_stopped(process.pid))
    wait_for(frozen.tick)
    frozen.end()
    wait_for(lambda: not is_stopped(process.pid))
    assert frozen.members == [3]


def test_what_is_slowed_runs_for_a_part_of_the_time(process: subprocess.Popen[str]) -> None:
    slowed = Slowed(Handle(process.pid), [0], 4.0, 1.0)
    stood: list[bool] = []
    while not slowed.tick():
        stood.append(is_stopped(process.pid))
        time.sleep(0.001)
    slowed.end()
    wait_for(lambda: not is_stopped(process.pid))
    assert set(stood) == {True, False}


def test_a_handle_of_one_that_has_ended_harms_nobody(process: subprocess.Popen[str]) -> None:
    handle = Handle(process.pid)
    process.kill()
    process.wait()
    handle.send(signal.SIGSTOP)
    handle.close()
    with pytest.raises(ProcessLookupError):
        Handle(process.pid)


def test_a_full_disk_takes_nothing_until_it_is_empty_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    said: list[tuple[float, str]] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def written() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert written() == "written"
        fault = Fault("fill", "disk", seconds=0.05)
        deed = Deed(fault, moment=time.time(), pids=[process.pid])
        full = FullDisk(deed, shelf, lambda _moment: said)
        assert full.is_full
        assert written() == str(27)
        said.append((deed.moment + 0.5, "the checkpoint of step 5 could not be written: …"))
        wait_for(lambda: full.tick() or not full.is_full)
        assert written() == "written"
        assert deed.detected == pytest.approx(0.5)
        assert deed.recovered is None
        shelf.save(7, {"a": 1})
        assert full.tick()
        assert deed.recovered is not None
        full.end()
        process.stdin.close()
        process.wait()


def test_a_full_disk_that_nobody_noticed_says_so(process: subprocess.Popen[str]) -> None:
    deed = Deed(Fault("fill", "disk", seconds=60.0), pids=[process.pid])
    full = FullDisk(deed, Shelf(Path("shelf")), lambda _moment: [])
    assert not full.tick()
    full.end()
    assert (full.is_full, deed.note) == (False, "no checkpoint was due")
    assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
