"""From a job to a trained, recorded and reported run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from .command import DIGITS, echelon, last_json, shelf, spawned

MLP = ["data.name=digits", "model={name: mlp, hidden: [64]}", "epochs=8", "optimizer.lr=5e-3"]


def test_trains_reports_evaluates_and_predicts(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "task: classify\ndata: {name: digits}\nmodel: {name: mlp, hidden: [64]}\n"
        "optimizer: {name: adam, lr: 5e-3}\nepochs: 8\n",
        encoding="utf-8",
    )
    done = last_json(spawned("train", "job.yaml", "batch_size=64", "--json", folder=tmp_path))
    assert done["metrics"]["accuracy"] > 0.9
    assert done["samples"] == 8 * 1438
    assert done["steps"] == 8 * 23
    folder = tmp_path / done["folder"]
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["batch_size"] == 64
    assert stored["optimizer"]["name"] == "adam"
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")

    shown = last_json(echelon("eval", "last", "--json", folder=tmp_path))
    assert shown["metrics"]["accuracy"] == pytest.approx(done["metrics"]["accuracy"])
    listed = json.loads(echelon("runs", "list", "--json", folder=tmp_path).stdout)
    assert [run["run"] for run in listed] == [done["run"]]


def test_predicts_new_rows_without_their_labels(tmp_path: Path) -> None:
    rows = ["a,b,label"] + [f"{i % 7},{i % 5},{'high' if i % 7 > 3 else 'low'}" for i in range(300)]
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "new.csv").write_text("a,b\n6,0\n0,4\n", encoding="utf-8")
    (tmp_path / "held.csv").write_text("\n".join(rows[:50]) + "\n", encoding="utf-8")
    trained = echelon(
        "train",
        "task=classify",
        "data.path=train.csv",
        "data.valid_path=held.csv",
        "epochs=20",
        "optimizer.lr=0.02",
        "-q",
        folder=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    told = echelon("predict", "last", "new.csv", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["label"] for row in found] == ["high", "low"]
    assert echelon("predict", "last", "new.csv", "--out", "p.jsonl", folder=tmp_path).stdout == ""
    assert (tmp_path / "p.jsonl").read_text(encoding="utf-8") == told.stdout


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    done = echelon("train", *MLP, "epochs=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert "accuracy" in done.stderr
    assert "held-out:" in done.stdout
    assert "report:" in done.stdout
    assert "next:" in done.stdout


def test_stops_at_its_target_and_when_nothing_improves(tmp_path: Path) -> None:
    done = last_json(
        echelon(
            "train", *MLP, "stop={metric: accuracy, target: 0.8}", "--json", "-q", folder=tmp_path
        )
    )
    assert "target reached" in done["reason"]
    assert done["samples"] < 8 * 1438
    stuck = ["optimizer={name: sgd, lr: 1e-9}", "epochs=50", "stop={metric: accuracy, patience: 2}"]
    done = last_json(echelon("train", *MLP, *stuck, "--json", "-q", folder=tmp_path))
    assert "no improvement in 2 evaluations" in done["reason"]


def test_a_batch_larger_than_the_data_is_reported(tmp_path: Path) -> None:
    done = echelon("train", *MLP, "batch_size=5000", "epochs=1", folder=tmp_path)
    assert "batch_size = 5000 is more than the 1438 training samples" in done.stderr


def test_stops_when_its_time_is_over(tmp_path: Path) -> None:
    done = last_json(
        echelon("train", *MLP, "epochs=null", "minutes=0.02", "--json", "-q", folder=tmp_path)
    )
    assert "minutes are over" in done["reason"]
    assert 1.0 < done["seconds"] < 100


def test_a_diverging_run_fails_names_the_layer_and_keeps_finite_weights(tmp_path: Path) -> None:
    wild = ["optimizer={name: sgd, lr: 1e30}", "checkpoint.every=1", "model={name: mlp}"]
    done = echelon("train", "data.name=digits", *wild, "-q", folder=tmp_path)
    assert done.returncode == 1
    assert "error: step " in done.stderr
    assert "layer 'model." in done.stderr
    assert "Traceback" not in done.stderr
    weights = shelf(tmp_path).load("last")["strategy"]["model"]
    assert all(bool(w.isfinite().all()) for w in weights.values())
    assert "failed" in echelon("runs", "list", folder=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.yaml"], "none.yaml: there is no such file"),
        (["train"], "needs data"),
        (["train", "a.yaml", "b.yaml"], "one job file at a time"),
        (["train", *MLP, "epochs"], "'epochs' is no file; to set epochs, write epochs=VALUE"),
        (["train", *MLP, "optimizer.lr"], "write optimizer.lr=VALUE"),
        (["train", *MLP, "epoch=3"], "did you mean 'epochs'?"),
        (["train", *MLP, "strategy=alreduce"], "strategy 'alreduce' is unknown"),
        (["train", *MLP, "workers=2"], "is one process (of several are: all_reduce, "),
        (["train", *MLP, "device=cuda:99"], "GPUs"),
        (["train", *MLP, "device=quantum"], "device 'quantum' is unknown"),
        (["train", *MLP, "stop.metric=acuracy"], "did you mean 'accuracy'?"),
        (["train", "data.name=digitz"], "did you mean 'digits'?"),
        (["train", "data.path=nowhere"], "nowhere"),
        (["train", *MLP, "model.hiden=[3]"], "did you mean 'hidden'?"),
        (["train", *MLP, "track.exporters=[mlflow]"], "echelon[mlflow]"),
        (["train", "--resume", "last"], "there are no runs"),
        (["eval", "last"], "there are no runs"),
        (["predict", "last"], "give either a file of data or --prompt"),
        (["predict", "last", "none.csv"], "there is no such file"),
        (["runs", "show", "nothing"], "there are no runs"),
        (["trian"], "no such command 'trian'. Did you mean 'train'?"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = echelon(*arguments, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*-0001")), "a mistake leaves no run behind"


def test_the_schema_and_the_resolved_job_are_printed(tmp_path: Path) -> None:
    schema = json.loads(echelon("config", "schema", folder=tmp_path).stdout)
    assert "single" in schema["properties"]["strategy"]["enum"]
    assert "mlp" in json.dumps(schema["properties"]["model"])
    shown = yaml.safe_load(echelon("config", "show", *DIGITS, folder=tmp_path).stdout)
    assert shown["data"]["augment"]["flip"] is True
    assert shown["seed"] == 0


def test_clicks_come_near_the_best_that_can_be_known(tmp_path: Path) -> None:
    settings = ["task=click_rate", "data={name: clicks, options: {rows: 20000, vocabulary: 5}}"]
    model = ["model={name: dlrm, interaction: dot}", "epochs=6", "batch_size=256", "threads=1"]
    done = last_json(
        echelon("train", *settings, *model, "optimizer.lr=5e-3", "--json", "-q", folder=tmp_path)
    )
    shown = json.loads(echelon("runs", "show", "last", "--json", folder=tmp_path).stdout)
    best = shown["facts"]["about"]["best_auc"]
    assert 0.97 * best < done["metrics"]["auc"] < best + 0.005
    assert "best_auc" in echelon("runs", "show", "last", folder=tmp_path).stdout


def test_a_language_model_writes(tmp_path: Path) -> None:
    text = "to be or not to be that is the question\n" * 100
    (tmp_path / "play.txt").write_text(text, encoding="utf-8")
    trained = echelon(
        "train",
        "task=language_model",
        "data={path: play.txt, length: 16, options: {stride: 1}}",  # windows begin anywhere
        "model={name: gpt, layers: 1, heads: 2, width: 32}",
        "steps=400",
        "schedule.name=cosine",
        "optimizer.lr=1e-2",
        "batch_size=16",
        "threads=1",
        "-q",
        folder=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    asked = ("predict", "last", "--prompt", "to be or", "--length", "32", "--temperature", "0")
    told = echelon(*asked, folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "not to be that is the" in told.stdout
    refused = echelon("predict", "last", "--prompt", "", folder=tmp_path)
    assert refused.returncode == 2
    assert "the prompt is empty" in refused.stderr
