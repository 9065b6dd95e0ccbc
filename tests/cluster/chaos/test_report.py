"""The report of trials, and what makes the command fail."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from echelon.checkpoint import Shelf
from echelon.cluster.chaos.measure import Difference, difference, kinds
from echelon.cluster.chaos.plan import read_plan
from echelon.cluster.chaos.run import Report, endure, show, show_all, unlike
from echelon.cluster.chaos.trial import Trial
from echelon.cluster.chaos.view import Deed
from echelon.core.config import Job, job_from
from echelon.core.errors import UserError
from echelon.loop.build import numerics
from echelon.strategy.model import build_model
from echelon.task import load_task, prepare

PLAN = read_plan("kill leader@step=5; kill trainer:1@step=9; freeze coordinator@step=9 for 1s")


def a_trial() -> Trial:
    kill = Deed(PLAN[0], 6, 1.0, members=[0], detected=0.25, recovered=0.5, lost_steps=3)
    skipped = Deed(PLAN[1], skipped="member 1 is the last trainer")
    frozen = Deed(PLAN[2], 9, 2.0, coordinator=True, note="training went on without it")
    return Trial(
        PLAN,
        7,
        run="digits-chaos-0001",
        finished=True,
        seconds=12.0,
        summary={"steps": 10, "metrics": {"loss": 0.5}},
        deeds=[kill, skipped, frozen],
        exactly_once=True,
        epochs=2,
    )


def shown(trial: Trial, report: Report | None = None, found: Difference | None = None) -> str:
    out = Console(width=200, file=io.StringIO())
    calm = Trial((), 0, run="calm", seconds=11.0, summary={"metrics": {"loss": 0.25}})
    show(out, trial, calm, found)
    if report is not None:
        show_all(out, report)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_every_fault_has_its_row_and_the_end_its_verdict() -> None:
    report = Report()
    report.add(a_trial(), Difference(3e-7, None))
    text = shown(a_trial(), report, Difference(3e-7, None))
    assert "member 0        6    0.25 s     0.50 s     3" in text
    assert "skipped: member 1 is the last trainer" in text
    assert "training went on without it" in text
    assert "exactly once: 2 epochs finished" in text
    assert "no process, shared memory or file is left behind" in text
    assert "held-out (without faults): loss 0.5000 (0.2500); 12.0 s (11.0 s)" in text
    assert "largest difference of a weight: 3.0e-07 (up to 0.0001 is rounding)" in text
    assert "2 faults (1 skipped) in 1 runs: 1 finished, 1 exactly once; " in text
    took = "losses detected after 0.25 s (worst 0.25 s), recovered after 0.50 s (worst 0.50 s)"
    assert took in text
    assert json.loads(text.splitlines()[-1]) == report.totals()


def test_several_runs_are_summed_up_by_the_kind_of_fault() -> None:
    report, later = Report(), a_trial()
    later.deeds[0].detected, later.deeds[0].recovered = 0.75, None
    report.add(a_trial(), None)
    report.add(later, None)
    rows = [" ".join(line.split()) for line in shown(later, report).splitlines()]
    assert "freeze coordinator 2 – –" in rows
    assert "kill leader 2 0.50 s (worst 0.75 s) 0.50 s (worst 0.50 s)" in rows
    assert [kind.name for kind in kinds(report.deeds)] == ["freeze coordinator", "kill leader"]


def test_what_should_not_be_is_told_and_counted() -> None:
    trial = a_trial()
    trial.problems.append("not exactly once: epoch 1: 3 samples twice")
    report = Report()
    report.add(trial, None)
    assert report.problems == ["digits-chaos-0001: not exactly once: epoch 1: 3 samples twice"]
    assert report.as_data()["ok"] is False
    assert "3 samples twice" in shown(trial, report)


def test_the_report_is_plain_data() -> None:
    report = Report(reference=Trial((), 0, run="calm"))
    report.add(a_trial(), Difference(0.5, "dropout draws anew for other members"))
    data = report.as_data()
    assert (data["faults"], data["skipped"], data["worst_recovery_s"]) == (2, 1, 0.5)
    assert data["reference"]["run"] == "calm"
    (trial,) = data["trials"]
    assert trial["plan"] == "; ".join(map(str, PLAN))
    assert trial["unlike"] == "dropout draws anew for other members"
    assert trial["faults"][0] == {
        "fault": "kill leader@step=5",
        "version": 6,
        "skipped": None,
        "members": [0],
        "detected_s": 0.25,
        "recovered_s": 0.5,
        "steps_lost": 3,
        "note": "",
        "problem": None,
    }


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Difference(0.5, "dropout draws anew for other members"), "5.0e-01; dropout draws anew"),
        (Difference(0.5, None), "5.0e-01, more than 0.0001"),
        (Difference(0.5, None, 1.0), "5.0e-01 (up to 1 is rounding)"),
    ],
)
def test_weights_that_differ_say_whether_they_may(found: Difference, words: str) -> None:
    assert words in shown(a_trial(), None, found)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (Difference(0.5, None, 1.0), None),
        (Difference(0.5, "dropout draws anew for other members"), None),
        (Difference(0.5, None), "a weight differs by 5.0e-01, which is more than 0.0001"),
        (Difference(math.nan, None), "a weight differs by nan, which is more than 0.0001"),
    ],
)
def test_weights_that_differ_are_a_problem_unless_they_may(
    found: Difference, problem: str | None
) -> None:
    trial, calm = a_trial(), Trial((), 0, summary={"steps": 10})
    assert found.problem == problem
    assert unlike(Job(), trial, calm, found) == ([] if problem is None else [problem])


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1),
        ({"minutes": 1}, 0),
        ({"stop": {"patience": 3}}, 0),
        ({"strategy": "parameter_server"}, 1),
        ({"strategy": "parameter_server", "parameter_server": {"staleness": 2}}, 0),
    ],
)
def test_a_run_of_another_length_is_a_problem_where_its_length_is_given(
    settings: dict[str, object], count: int
) -> None:
    calm = Trial((), 0, summary={"steps": 1011})
    found = unlike(job_from(settings), a_trial(), calm, Difference(0.0, None))
    assert found == ["it made 10 updates, and 1,011 without faults"][:count]


def test_a_weight_that_is_not_a_number_is_not_lost_among_others(tmp_path: Path) -> None:
    for run, value in (("one", math.nan), ("other", 0.0)):
        model = {"a": torch.ones(2), "b": torch.tensor(value), "c": torch.ones(0)}
        cut = {"strategy": {"version": len(run), "model": model}}
        Shelf(tmp_path / run / "checkpoints").save(len(run), cut)
    assert math.isnan(difference(Job(), tmp_path / "one", tmp_path / "other").largest)


def saved(folder: Path, version: int, value: float) -> Path:
    model = {"weight": torch.full((2,), value), "count": torch.tensor(3)}
    cut = {"strategy": {"version": version, "model": model}}
    Shelf(folder / "checkpoints").save(version, cut)
    return folder


def test_runs_of_different_length_are_not_expected_to_end_alike(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", 5, 0.25), saved(tmp_path / "other", 6, 0.75)
    found = difference(Job(), one, other)
    assert (found.largest, found.unlike) == (0.5, "they made 5 and 6 updates")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, None),
        ({"dropout": 0.2}, "dropout draws anew for other members"),
        ({"norm": "batch"}, "batch norm's statistics are of each member's own samples"),
    ],
)
def test_a_model_may_be_why_runs_end_differently(
    tmp_path: Path, settings: dict[str, object], why: str | None
) -> None:
    job = job_from(
        {
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [4], **settings},
            "sync": {"batch_norm": "local"},
        }
    )
    model = build_model(prepare(load_task(job)), numerics(job, torch.device("cpu")))
    cut = {"strategy": {"version": 5, "model": model.state_dict()}}
    for run in ("one", "other"):
        Shelf(tmp_path / run / "checkpoints").save(5, cut)
    assert difference(job, tmp_path / "one", tmp_path / "other") == Difference(0.0, why)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "all_reduce", "workers": 1}, "workers = 1: chaos needs at least 2"),
        ({"strategy": "pipeline", "workers": 2}, "members of strategy 'pipeline' cannot do with"),
        (
            {"strategy": "all_reduce", "workers": 2, "elastic": {"enabled": False}},
            "members of strategy 'all_reduce' cannot do without each other here",
        ),
    ],
)
def test_a_job_that_cannot_lose_anybody_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        endure(job_from(settings), [], plan=PLAN)
