"""A command with all processes it starts: found while they live, and all killed in the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from echelon.cluster.chaos import view
from echelon.cluster.chaos.trial import remains, shared_memory
from echelon.cluster.chaos.view import Command, in_session
from tests.cluster.shared import wait_for

pytestmark = pytest.mark.timeout(120)

# A command that starts one of its own, in another process group, and leaves it behind.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print("started", child.pid, flush=True)
print("well\\nlast words", file=sys.stderr, flush=True)
if sys.argv[1:] == ["wait"]:
    child.wait()
"""


class Here(Command):
    """Another program than Echelon's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        script = Path("parent.py")
        script.write_text(PARENT)
        monkeypatch.setattr(view, "PROGRAM", [sys.executable, str(script)])
        super().__init__(arguments)

    def child(self) -> int:
        def said() -> bool:
            self.drain()
            return self.output.startswith("started") and self.output.endswith("\n")

        wait_for(said)
        return int(self.output.split()[1])


def test_all_that_a_command_started_is_its_family_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Here(monkeypatch, "wait") as command:
        child = command.child()
        assert command.family() == sorted([command.pid, child])
        assert command.status is None
    assert in_session(command.pid) == []
    assert command.status == -9


def test_what_is_left_behind_is_found_though_its_parent_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Here(monkeypatch) as command:
        child = command.child()
        wait_for(lambda: command.status == 0)
        assert command.family() == [child]
        command.drain()
        assert command.last_words == "last words"
        assert [text for _, text in command.lines] == ["well", "last words"]
        assert command.lines[0][0] <= time.time()
    assert in_session(command.pid) == []


def test_a_run_may_leave_no_invitation_and_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    assert remains(tmp_path, shared_memory()) == []
    (tmp_path / "join").touch()
    (tmp_path / "checkpoints" / ".writing-step-1-7").mkdir(parents=True)
    found = remains(tmp_path, shared_memory())
    assert found == [
        f"file {tmp_path}/join",
        f"file {tmp_path}/checkpoints/.writing-step-1-7",
    ]
