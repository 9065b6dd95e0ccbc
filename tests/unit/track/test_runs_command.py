"""`echelon runs`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from echelon.cli.runs import app
from echelon.core.errors import RunError
from echelon.track import Store

Trained = Callable[..., str]


def _output(*arguments: str) -> str:
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert "\x1b" not in found.output, "no colour codes without a terminal"
    return found.output


def test_list_is_an_aligned_table_latest_first(trained: Trained, store: Store) -> None:
    trained()
    store.create("a-much-longer-name", {}, {"task": "gpt"})
    header, *rows = _output("list").splitlines()
    assert header.split()[:3] == ["RUN", "STATUS", "TASK"]
    assert [row.split()[0] for row in rows] == ["a-much-longer-name-0001", "digits-0001"]
    assert [row.index(word) for row, word in zip(rows, ("running", "done"), strict=True)] == [
        header.index("STATUS")
    ] * 2
    assert "accuracy 0.9817" in rows[1]


def test_list_shows_only_so_many(store: Store) -> None:
    for _ in range(5):
        store.create("digits", {}, {})
    lines = _output("list", "--limit", "2").splitlines()
    assert len(lines) == 4
    assert lines[-1] == "… 3 older ones (--limit 5 shows all)"


def test_an_empty_folder_is_no_error() -> None:
    assert _output("list") == "no runs in runs yet: echelon train makes one\n"
    assert json.loads(_output("list", "--json")) == []


def test_list_as_json(trained: Trained) -> None:
    trained()
    (run,) = json.loads(_output("list", "--json"))
    assert (run["run"], run["status"], run["steps"]) == ("digits-0001", "done", 200)
    assert run["best"] == {"metric": "accuracy", "value": 0.9817, "step": 200}


def test_show_tells_everything(trained: Trained) -> None:
    trained()
    shown = _output("show", "last")
    assert "digits-0001  done" in shown
    assert "best accuracy 0.9817 at step 200" in shown
    (curve,) = (line for line in shown.splitlines() if line.startswith("train/loss"))
    assert "█" in curve
    assert "▁" in curve
    assert "step 100  layer fc1: the gradient vanishes" in shown
    assert "  lr: 0.001" in shown
    assert "runs/digits-0001" in shown
    assert "report.html" not in shown


def test_show_of_a_run_that_has_nothing_yet(store: Store) -> None:
    store.create("digits", {}, {})
    shown = _output("show", "digits")
    assert "Still running" in shown
    assert "curves" not in shown


def test_show_as_json_has_the_whole_run(trained: Trained) -> None:
    trained()
    shown = json.loads(_output("show", "digits-0001", "--json"))
    assert shown["config"]["optimizer"] == {"name": "adamw", "lr": 0.001}
    assert shown["series"]["valid/accuracy"]["steps"] == [50, 100, 150, 200]
    assert shown["events"][0]["message"].startswith("layer fc1")
    assert shown["facts"]["environment"]["python"]


def test_show_tells_what_trainers_and_servers_did(store: Store) -> None:
    trainers = {"0": {"applied": 5.0, "staleness_0": 4.0, "staleness_2": 1.0}}
    nodes = {"trainers": trainers, "servers": {"0": {"rounds": 5.0, "apply_seconds": 0.5}}}
    store.finish(store.create("digits", {}, {}), "done", {"nodes": nodes})
    shown = [" ".join(line.split()) for line in _output("show", "digits").splitlines()]
    assert "0 5 0.40 0: 4, 2: 1 in memory in memory 0.0 s 0 0" in shown
    assert shown[shown.index("servers") + 2] == "0 5 0.50 s"
    assert json.loads(_output("show", "digits", "--json"))["nodes"] == nodes


def test_compare_shows_differences_alone_and_marks_the_best(trained: Trained, store: Store) -> None:
    trained(config={"epochs": 4, "optimizer": {"name": "sgd", "lr": 0.1}, "same": 1})
    second = trained(config={"epochs": 4, "optimizer": {"name": "adam", "lr": 0.1}, "extra": True})
    store.finish(second, "done", {"metrics": {"loss": 0.01, "accuracy": 0.9}})
    rows = {
        line.split()[0]: line.split()[1:]
        for line in _output("compare", "digits-0001", "digits-0002").splitlines()[1:]
    }
    assert rows["optimizer.name"] == ["sgd", "adam"]
    assert rows["extra"] == ["–", "True"]
    assert rows["loss"] == ["0.0785", "0.01", "*"]
    assert rows["accuracy"] == ["0.9817", "*", "0.9"]
    assert not {"epochs", "optimizer.lr"} & set(rows)


def test_compare_as_json(trained: Trained) -> None:
    for epochs in (1, 2):
        trained(config={"epochs": epochs})
    found = json.loads(_output("compare", "digits-0001", "digits-0002", "--json"))
    assert found["config"] == {"epochs": [1, 2]}
    assert found["metrics"]["loss"] == [0.0785, 0.0785]
    assert [run["run"] for run in found["runs"]] == ["digits-0001", "digits-0002"]


def test_report_is_written_again_and_shown(trained: Trained, store: Store) -> None:
    run = trained()
    said = _output("report", "last").strip()
    assert said == "runs/digits-0001/report.html"
    assert (store.folder / run / "report.html").is_file()
    assert "report  " in _output("show", "last")


def test_another_folder_can_be_given(trained: Trained, store: Store) -> None:
    trained()
    moved = store.folder.rename(store.folder.with_name("elsewhere"))
    assert "digits-0001" in _output("list", "--folder", str(moved))


@pytest.mark.parametrize("verb", ["show", "compare", "report"])
def test_an_unknown_run_is_a_user_s_mistake(verb: str, trained: Trained) -> None:
    trained()
    with pytest.raises(RunError, match="did you mean 'digits-0001'"):
        CliRunner().invoke(app, [verb, "digits-001x"], catch_exceptions=False)
