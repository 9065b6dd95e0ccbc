"""Ctrl-C at any moment of a command: one line, exit code 130, nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from echelon.cli.common import INTERRUPTED, stoppable

pytestmark = pytest.mark.timeout(120)

LINE = "echelon: stopped\n"

# A real process that gets a real signal when a module is about to be imported.
PRESS = """
import os, runpy, signal, sys
moment = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[0] = "echelon"
runpy.run_module("echelon", run_name="__main__")
"""
# The same when the command is done.
AFTER = """
import atexit, os, runpy, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv[0] = "echelon"
runpy.run_module("echelon", run_name="__main__")
"""


def run(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def press_and_raise(error: Exception) -> NoReturn:
    """What compiled modules do: they make something else of it."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise error from None
    raise AssertionError


@pytest.mark.parametrize(
    ("moment", "command"),
    [
        ("typer", ["runs", "list"]),
        ("echelon.cluster.environment", ["config", "show"]),
        ("echelon.track.views", ["runs", "list"]),
        ("numpy._core.multiarray", ["train", "task=classify", "data.name=digits"]),
        ("numpy._core.multiarray", ["chaos", "task=classify", "data.name=digits", "--random=1"]),
    ],
)
def test_ctrl_c_during_imports_is_one_line(moment: str, command: list[str], tmp_path: Path) -> None:
    done = run(PRESS, moment, *command, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", LINE)
    assert not list(tmp_path.iterdir())


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    done = run(AFTER, "runs", "list", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no runs" in done.stdout


def test_whatever_comes_of_it_ctrl_c_was_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, stoppable():
        press_and_raise(ImportError("initialization failed"))
    assert ended.value.exit_code == INTERRUPTED
    assert capfd.readouterr().err == LINE


def test_other_faults_are_not_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), stoppable():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_that_said_it_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, stoppable():
        press_and_raise(typer.Exit(3))
    assert ended.value.exit_code == 3
    assert not capfd.readouterr().err


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
