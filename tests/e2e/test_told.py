"""What the command says at the end can be copied, and an end is never mistaken for success."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import echelon

pytestmark = pytest.mark.timeout(300)

SHORT = ["data.name=digits", "model={name: mlp, hidden: [8]}", "steps=3", "threads=1", "-q"]


def test_hints_say_where_the_run_is_and_what_has_no_effect(tmp_path: Path) -> None:
    done = echelon("train", *SHORT, "track.folder=my runs", "elastic.wait=9", folder=tmp_path)
    assert "step 0: elastic.wait has no effect with strategy 'single'\n" in done.stderr
    said = done.stdout
    assert "runs show classify-0001 --folder 'my runs'\n" in said
    assert "train --resume classify-0001 track.folder='my runs' steps=…\n" in said
    assert "runs compare --folder 'my runs'\n" in said


@pytest.mark.parametrize(
    ("text", "line"),
    [("import sys\nsys.exit(0)\n", 2), ("def task():\n    raise SystemExit('enough')\n", 2)],
)
def test_a_task_that_exits_has_not_trained(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "mine.py").write_text(text)
    done = echelon("train", "task=mine.py:task", folder=tmp_path)
    assert done.returncode == 2
    assert f"mine.py:{line}: the task called exit(" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_before_the_first_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def task():\n    raise KeyboardInterrupt\n")
    done = echelon("train", "task=mine.py:task", folder=tmp_path)
    assert done.returncode == 130
    assert done.stderr == "echelon: stopped\n"


@pytest.mark.parametrize("setting", ["mesh={data:2}", "tensor.plan={net.0:rows}"])
def test_a_colon_without_a_space_is_explained(tmp_path: Path, setting: str) -> None:
    done = echelon("train", *SHORT, setting, folder=tmp_path)
    assert done.returncode == 2
    assert "YAML wants a space after the colon, {" in done.stderr
    assert len(done.stderr.splitlines()) == 1
