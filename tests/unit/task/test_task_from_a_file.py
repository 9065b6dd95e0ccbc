"""A task function in a user's file: its arguments, its imports, its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.config import Job, job_from
from echelon.core.errors import TaskError
from echelon.task import anchored, load_task

SOURCE = """\
import torch
from helper import WIDTH
from echelon import Task, cross_entropy

def build(rows=4, *, job):
    x = torch.ones(rows, WIDTH)
    return Task(model=lambda: torch.nn.Linear(WIDTH, 2), loss=cross_entropy,
                train={"x": x, "y": torch.zeros(rows).long()}, name=f"own-{job.batch_size}")

def needs(width):
    return width

def number():
    return 3

def positional(width, /):
    return width

def named(*, width):
    return width

def late():
    import late_helper
    return Task(
        model=lambda: torch.nn.Linear(__import__("later_still").WIDTH, 2), loss=cross_entropy,
        name=late_helper.NAME)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 5\n", encoding="utf-8")
    (tmp_path / "late_helper.py").write_text("NAME = 'late'\n", encoding="utf-8")
    (tmp_path / "later_still.py").write_text("WIDTH = 5\n", encoding="utf-8")
    path = tmp_path / "own.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def job(task: str, **settings: object) -> Job:
    return job_from({"task": task, **settings})


def test_a_function_gets_its_args_and_the_job(file: Path) -> None:
    task = load_task(job(f"{file}:build", args={"rows": 7}, batch_size=16))
    assert task.name == "own-16"
    assert task.train["x"].shape == (7, 5)


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("{file}:bild", {}, "function 'bild' is unknown; did you mean 'build'?"),
        ("{file}:build", {"row": 3}, "'row' is unknown; did you mean 'rows'?"),
        ("{file}:needs", {}, "needs args: width"),
        ("{file}:named", {}, "needs args: width"),
        ("{file}:positional", {"width": 3}, "args go by name, but 'width' is positional-only"),
        ("{file}:build", {"job": 3}, "'job' is the job itself"),
        ("{file}:number", {}, "returned a int: it must return an echelon.Task"),
        ("{file}x:build", {}, "there is no file"),
    ],
)
def test_a_wrong_name_or_argument_is_one_clear_line(
    file: Path, task: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(job(task.format(file=file), args=args))
    assert message in str(caught.value)


def test_what_lies_beside_the_file_can_be_imported_late(file: Path) -> None:
    task = load_task(job(f"{file}:late"))
    assert task.name == "late"
    assert task.model().in_features == 5


def test_only_a_function_that_takes_the_job_takes_other_data(file: Path) -> None:
    assert load_task(job(f"{file}:build"), {}).name == "own-32"
    with pytest.raises(TaskError, match="late brings its own data"):
        load_task(job(f"{file}:late"), {})


def test_a_syntax_error_names_the_line(file: Path) -> None:
    file.write_text("def build(:\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"own\.py:1: "):
        load_task(job(f"{file}:build"))


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("x", encoding="utf-8")
    with pytest.raises(TaskError, match="must be a Python file"):
        load_task(job(f"{tmp_path / 'own.txt'}:build"))


def test_a_task_file_is_found_beside_the_job(file: Path) -> None:
    assert anchored(job("own.py:build"), file.parent).task == f"{file}:build"
    assert anchored(job("classify"), file.parent).task == "classify"
