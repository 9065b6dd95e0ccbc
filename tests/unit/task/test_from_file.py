from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.config import Job, job_from
from echelon.core.errors import ConfigError, TaskError
from echelon.task import anchored, check, load_task

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
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 5\n", encoding="utf-8")
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "clasify"}, "task 'clasify' is unknown; did you mean 'classify'?"),
        ({"task": "own.py"}, "a task of your own is path/to/file.py:function"),
        ({"task": "classify"}, "needs data"),
        ({"task": "own.py:f", "model": {"name": "mlp"}}, "chosen by the task's own file"),
        ({"task": "classify", "model": {"name": "mpl"}}, "did you mean 'mlp'?"),
    ],
)
def test_a_job_that_cannot_work_is_refused_at_once(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job_from(settings, checks=[check])
    assert message in str(caught.value)
