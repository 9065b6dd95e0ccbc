"""Trained runs asked for what they cannot give: one line, exit code 2, nothing half-done."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.cli.main import main

from .command import DEADLINE, last_json

ROWS = ["a,b,label"] + [f"{i % 7},{i % 5},{'high' if i % 7 > 3 else 'low'}" for i in range(300)]
OWN = """\
from pathlib import Path
import torch
import echelon

def build():
    x = torch.arange(12.0).view(6, 2)
    data = {"x": x, "y": torch.tensor([0, 1] * 3)}
    return echelon.Task(model=lambda: torch.nn.Linear(2, 2), loss=echelon.cross_entropy,
                        train=data, valid=data, name="own",
                        metrics={"nothing": lambda output, batch: (output.sum() * 0, 0.0)})

def reads(job):
    task = build()
    if job.data.path is not None:
        rows = [[float(v) for v in line.split(",")] for line in
                Path(job.data.path).read_text().splitlines()]
        task.valid = {"x": torch.tensor(rows)}
    return task
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.csv").write_text("\n".join(ROWS) + "\n", encoding="utf-8")
    (folder / "new.csv").write_text("a,b\n6,0\n0,4\n", encoding="utf-8")
    (folder / "play.txt").write_text("to be or not to be\n" * 30, encoding="utf-8")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    (folder / "two.txt").write_text("1,2\n3,4\n", encoding="utf-8")
    gpt = ["data={path: play.txt, length: 8}", "model={layers: 1, heads: 1, width: 8}"]
    for settings in (
        ["name=table", "data.path=train.csv", "epochs=20", "optimizer.lr=0.02"],
        ["name=text", "task=language_model", *gpt, "steps=2"],
        ["name=own", "task=own.py:build", "epochs=1"],
        ["name=reads", "task=own.py:reads", "epochs=1"],
    ):
        done = asked("train", "-q", "threads=1", "track.report=false", *settings, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def asked(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in this process, which has torch at hand."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["echelon", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    return subprocess.CompletedProcess(
        arguments, code if isinstance(code, int) else 0, out.getvalue(), err.getvalue()
    )


def refused(*arguments: str, folder: Path) -> str:
    """The one line that was said."""
    done = asked(*arguments, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nodir/x", "--out nodir/x: there is no folder nodir"),
        (".", "--out .: is a folder"),
        ("/proc/x.jsonl", "--out /proc/x.jsonl: cannot be written"),
        ("/dev/full", "--out /dev/full: cannot be written: No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_is_said(trained: Path, out: str, message: str) -> None:
    before = sorted(trained.iterdir())
    assert message in refused("predict", "table", "new.csv", "--out", out, folder=trained)
    assert sorted(trained.iterdir()) == before


def test_an_earlier_output_is_left_as_it_was_when_predicting_fails(trained: Path) -> None:
    (trained / "kept.jsonl").write_text("before\n", encoding="utf-8")
    (trained / "bad.csv").write_text("a\n1\n", encoding="utf-8")
    refused("predict", "table", "bad.csv", "--out", "kept.jsonl", folder=trained)
    assert (trained / "kept.jsonl").read_text(encoding="utf-8") == "before\n"
    assert not list(trained.glob(".*.part"))


@pytest.mark.parametrize("words", [["predict", "table", "new.csv"], ["eval", "table"]])
def test_a_full_disk_behind_stdout_is_one_line(trained: Path, words: list[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *words],
            cwd=trained,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_what_a_label_should_be_is_said_whatever_it_is(trained: Path) -> None:
    (trained / "odd.csv").write_text("a,b,label\n6,0,unheard of\n0,4,low\n", encoding="utf-8")
    told = asked("predict", "table", "odd.csv", folder=trained)
    assert [json.loads(line)["label"] for line in told.stdout.splitlines()] == ["high", "low"]
    assert "unheard of" in refused("eval", "table", "data.path=odd.csv", folder=trained)


def test_data_may_be_called_anything(trained: Path) -> None:
    told = asked("predict", "table", "new.csv", folder=trained)
    assert [json.loads(line)["label"] for line in told.stdout.splitlines()] == ["high", "low"]
    for name in ("new #2.csv", "a: b.csv"):
        shutil.copy(trained / "new.csv", trained / name)
        assert asked("predict", "table", name, folder=trained).stdout == told.stdout
    (trained / "123").mkdir()
    shutil.copy(trained / "new.csv", trained / "123" / "test.csv")
    assert asked("predict", "table", "123", folder=trained).stdout == told.stdout


def test_a_task_from_a_file_takes_other_data_only_if_it_asks_for_the_job(trained: Path) -> None:
    for words in (["predict", "own", "two.txt"], ["eval", "own", "data.path=two.txt"]):
        assert "build brings its own data" in refused(*words, folder=trained)
    assert len(asked("predict", "reads", "two.txt", folder=trained).stdout.splitlines()) == 2


def test_what_is_not_a_number_is_null_in_json(trained: Path) -> None:
    shown = last_json(asked("eval", "own", "--json", folder=trained))
    assert shown["metrics"]["nothing"] is None
    assert shown["samples"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "text", "play.txt"], "use --prompt"),
        (["eval", "table", "data.path=new.csv"], "new.csv: evaluation needs the target column"),
        (["eval", "table", "data={path: new.csv}"], "evaluation needs the target column 'label'"),
        (["eval", "table", "data.held_out=0.5"], "data.held_out cannot change"),
        (["eval", "table", "data={path: train.csv, held_out: 0.5}"], "data.held_out cannot"),
        (["eval", "table", "optimizer.lr=3"], "setting 'optimizer.lr' is unknown (choices: data"),
        (["eval", "table", "devcie=cpu"], "did you mean 'device'?"),
        (
            ["train", "data.path=train.csv", "data.valid_path=new.csv"],
            "new.csv has no target column: held-out figures cannot be computed",
        ),
    ],
)
def test_a_mistake_is_one_line(trained: Path, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments, folder=trained)


def test_other_data_and_machine_settings_can_be_given(trained: Path) -> None:
    own = last_json(asked("eval", "table", "device=cpu", "threads=1", "--json", folder=trained))
    assert own["samples"] == 60
    same = last_json(asked("eval", "table", "data.path=train.csv", "--json", folder=trained))
    assert same == own
    shutil.copy(trained / "train.csv", trained / "other.csv")
    for other in ("data.path=other.csv", "data={path: other.csv}"):
        shown = last_json(
            asked("eval", "table", other, "evaluate.batch_size=7", "--json", folder=trained)
        )
        assert shown["samples"] == 300


@pytest.mark.parametrize("verb", [["eval"], ["train", "--resume"]])
def test_a_damaged_config_is_one_line(tmp_path: Path, trained: Path, verb: list[str]) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    (config,) = (tmp_path / "runs").glob("table*/config.yaml")
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("task: classify", "task: clasify"), encoding="utf-8")
    said = refused(*verb, "table", folder=tmp_path)
    assert "config.yaml:2: task 'clasify' is unknown; did you mean 'classify'?" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trin"], "no such command 'trin'. Did you mean 'train'? (see 'echelon --help')"),
        (["train", "--bogus"], "no such option: --bogus (see 'echelon train --help')"),
        (
            ["data", "prepare"],
            "missing argument 'RECIPE.yaml [KEY=VALUE]...' (see 'echelon data prepare --help')",
        ),
        (
            ["data", "prepare", "recipe.yaml", "--workers", "0"],
            "invalid value for '--workers' / '-w': Input should be greater than or equal to 1 "
            "(see 'echelon data prepare --help')",
        ),
    ],
)
def test_a_command_that_is_called_wrongly_says_so_in_one_line(
    tmp_path: Path, words: list[str], line: str
) -> None:
    done = asked(*words, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")


def test_a_command_without_words_shows_what_there_is(tmp_path: Path) -> None:
    done = asked("data", folder=tmp_path)
    assert done.returncode == 2
    assert "prepare" in done.stdout
    assert done.stderr == ""
