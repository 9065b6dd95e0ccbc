"""Progress in a terminal, in a log, and quiet."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from echelon.track import progress
from echelon.track.progress import Notices, Pace, PlainProgress, TerminalProgress, described

VALUES = {
    "epoch": 1,
    "samples": 3200,
    "loss": 0.1234,
    "lr": 1e-3,
    "steps_per_s": 812.3,
    "samples_per_s": 26_001.0,
    "seconds": 2.0,
}
_SUMMARY = {"run": "digits-0001", "steps": 200, "samples": 6400, "seconds": 4.0}
_STORY = """
import sys
from echelon.track import Observers, progress
with Observers([progress()]) as told:
    told.started("digits-0001", {"task": "digits", "total_steps": 100, "epochs": 2})
    told.progressed(50, {"epoch": 1, "loss": 0.25, "seconds": 1.0})
    print("from the task")
    told.evaluated(50, {"accuracy": 0.5})
    told.noticed(60, "careful [bold]now[/]")
    told.finished("done", {"steps": 100, "samples": 3200, "seconds": 2.0})
print('{"run": "digits-0001"}')
"""


def test_plain_lines_say_where_the_run_is(facts: dict[str, Any]) -> None:
    out = io.StringIO()
    plain = PlainProgress(out, every=0.0)
    plain.started("digits-0001", facts)
    plain.progressed(0, VALUES | {"epoch": 0, "seconds": 0.0})
    plain.progressed(100, VALUES)
    plain.evaluated(100, {"loss": 0.2, "accuracy": 0.9638})
    plain.noticed(101, "layer fc1: the gradient vanishes")
    plain.finished("done", _SUMMARY)
    assert out.getvalue().splitlines() == [
        "digits-0001: digits · mlp · 4.81k parameters · 1,437 samples · batch 32 · single · "
        "cpu fp32",
        "epoch 1/4  step 0/200  loss 0.1234  lr 0.001  812 step/s  26k samples/s",
        "epoch 2/4  step 100/200  loss 0.1234  lr 0.001  812 step/s  26k samples/s  0:02 left",
        "step 100  evaluated  loss 0.2  accuracy 0.9638",
        "step 101: layer fc1: the gradient vanishes",
        "done in 4.0 s · 200 steps · 6,400 samples",
    ]


def test_plain_lines_do_not_flood_a_log(facts: dict[str, Any]) -> None:
    out = io.StringIO()
    plain = PlainProgress(out, every=60.0)
    plain.started("digits-0001", facts)
    for step in range(1000):
        plain.progressed(step, VALUES)
    assert len(out.getvalue().splitlines()) == 1


def test_quiet_still_tells_what_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = progress(quiet=True)
    quiet.started("digits-0001", {})
    quiet.progressed(1, VALUES)
    quiet.logged(1, VALUES)
    quiet.evaluated(1, {"loss": 1.0})
    quiet.noticed(1, "careful")
    quiet.finished("done", _SUMMARY)
    assert capsys.readouterr() == ("", "step 1: careful\n")


def test_where_there_is_no_terminal_lines_are_plain() -> None:
    assert type(progress()) is PlainProgress
    assert type(progress(quiet=True)) is Notices


def test_the_time_left_counts_from_where_a_resumed_run_began(facts: dict[str, Any]) -> None:
    pace = Pace(facts)
    pace.note(100, {"seconds": 50.0})
    assert pace.left is None
    pace.note(150, {"seconds": 55.0})
    assert pace.left == pytest.approx(5.0)


def test_without_a_known_end_there_is_no_time_left() -> None:
    pace = Pace({"total_steps": None, "epochs": None})
    pace.note(5, {"seconds": 1.0, "epoch": 0})
    pace.note(10, {"seconds": 2.0, "epoch": 0})
    assert pace.place() == ["epoch 1", "step 10"]
    assert pace.time_left() == []


def test_the_last_epoch_is_not_exceeded(facts: dict[str, Any]) -> None:
    pace = Pace(facts)
    pace.note(200, {"epoch": 4})
    assert pace.place() == ["epoch 4/4", "step 200/200"]


def test_many_workers_are_named() -> None:
    assert described({"strategy": "all_reduce", "workers": 4}) == ["all_reduce", "4 workers"]


def test_the_terminal_shows_a_bar_and_keeps_evaluations(facts: dict[str, Any]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    bar = TerminalProgress(console)
    bar.started("digits-0001", facts)
    bar.progressed(0, VALUES | {"seconds": 0.0})
    bar.progressed(100, VALUES)
    bar.logged(100, VALUES)
    bar.evaluated(100, {"loss": 0.2, "accuracy": 0.9638})
    bar.noticed(101, "careful [red]now[/]")
    bar.finished("done", _SUMMARY)
    shown = screen.getvalue()
    assert "━" in shown
    assert "50 %   epoch 2/4   step 100/200   0:02 left" in shown
    assert "loss 0.1234   lr 0.001   812 step/s   26k samples/s" in shown
    assert "valid loss 0.2 accuracy 0.9638" in shown
    assert "✓ step 100   loss 0.2   accuracy 0.9638" in shown
    assert "careful [red]now[/]" in shown
    assert shown.rstrip().endswith("done in 4.0 s · 200 steps · 6,400 samples")


def test_a_narrow_terminal_drops_what_does_not_fit(facts: dict[str, Any]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=44, color_system=None)
    bar = TerminalProgress(console)
    bar.started("digits-0001", facts | {"total_steps": None})
    bar.progressed(100, VALUES)
    bar.evaluated(100, {"accuracy": 0.9})
    bar.finished("stopped", _SUMMARY)
    shown = screen.getvalue()
    assert "loss 0.1234   lr 0.001   812 step/s" in shown
    assert "samples/s   valid" not in shown


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_real_terminal_gets_the_bar_and_stdout_only_the_result(term: str) -> None:
    """stderr is a terminal, stdout a pipe: what the task prints and the result stay in the pipe."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", _STORY],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "TERM": term},
    )
    os.close(slave)
    with os.fdopen(master, "rb", buffering=0) as screen:
        out = child.communicate(timeout=100)[0]
        shown = screen.read(65536).decode()
    assert out == 'from the task\n{"run": "digits-0001"}\n'
    assert ("━" in shown) == (term != "dumb")
    assert "careful [bold]now[/]" in shown
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l"), "the cursor is back"
