"""Runs that were refused, ended, changed or disturbed, and go on right."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

from echelon.core.errors import NonFiniteError
from echelon.track import Store

from .command import DEADLINE, DIGITS, last_json, shelf, start, wait_for
from .command import echelon as command
from .test_api import model, pairs, task, train


def same(left: nn.Module, right: nn.Module) -> bool:
    both = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in both)


def test_a_live_run_cannot_be_resumed_and_is_not_disturbed(tmp_path: Path) -> None:
    endless = ["epochs=100000", "checkpoint.every=20", "-q"]
    with start("train", *DIGITS, *endless, folder=tmp_path) as live:
        wait_for(lambda: shelf(tmp_path).versions(), live)
        for _ in range(2):
            refused = command("train", "--resume", "last", folder=tmp_path)
            assert refused.returncode == 2
            assert "is still running" in refused.stderr
        assert Store(tmp_path / "runs").run("last").status == "running"
        os.kill(live.pid, signal.SIGINT)
        live.communicate(timeout=DEADLINE)
    assert Store(tmp_path / "runs").run("last").status == "stopped"


@pytest.mark.parametrize(
    "end",
    [{"steps": 10}, {"epochs": 2}, {"stop": {"target": 1e9, "mode": "min"}}],
    ids=["steps", "epochs", "target"],
)
def test_resuming_a_run_that_has_ended_changes_nothing(end: dict[str, Any]) -> None:
    done = train(task(), **end)
    again = train(task(), resume=done.run, **end)
    assert again.steps == done.steps
    assert same(again.model, done.model)
    assert again.metrics == done.metrics


def test_what_was_changed_on_resume_is_kept_for_the_next_time(tmp_path: Path) -> None:
    first = train(task(), epochs=1)
    train(task(), resume=first.run, epochs=2)
    stored = yaml.safe_load((tmp_path / "runs" / first.run / "config.yaml").read_text())
    assert stored["epochs"] == 2
    assert Store("runs").run(first.run).config["epochs"] == 2
    assert stored["track"]["report"] is False, "sections are merged key by key"


def test_other_data_cannot_be_slipped_under_a_run(tmp_path: Path) -> None:
    for names in ("pq", "yz"):
        rows = ["a,label"] + [f"{i % 7},{names[i % 2]}" for i in range(60)]
        (tmp_path / "t.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        resume = ["--resume", "last"] if names == "yz" else ["data.path=t.csv"]
        done = command("train", *resume, "epochs=2", "-q", folder=tmp_path)
    assert done.returncode == 2
    assert "began with other data" in done.stderr


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def test_a_left_out_batch_leaves_no_trace_in_batch_statistics() -> None:
    x, y = pairs()
    x[5, 3] = torch.nan
    bad = task(model=with_batch_norm, train={"x": x, "y": y})
    result = train(bad, health={"non_finite": "skip"}, epochs=2)
    state = result.model.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert int(state["1.num_batches_tracked"]) == result.steps


def test_a_run_without_any_finite_update_ends() -> None:
    x, y = pairs()
    hopeless = task(train={"x": x * torch.nan, "y": y})
    with pytest.raises(NonFiniteError, match="no sample of epoch 0"):
        train(hopeless, health={"non_finite": "skip"}, steps=5, epochs=None)


def test_weights_that_are_not_finite_are_never_saved() -> None:
    wild = {"name": "adamw", "lr": 3e38}
    # Whichever comes first: the next update fails on these weights, or they are found in the copy.
    with pytest.raises(NonFiniteError, match=r"is nan|this checkpoint is not written"):
        train(task(), optimizer=wild, checkpoint={"every": 1}, evaluate={"every": "never"})
    assert not list(Path("runs").glob("*/checkpoints/step-*"))


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from every generator there is, as augmenting data sets do."""

    def __init__(self) -> None:
        self.x, self.y = pairs()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = random.random() + float(np.random.rand())
        return self.x[index] + torch.randn(8) * 0.1 + shift * 0.1, self.y[index]


def test_a_dataset_that_draws_at_random_resumes_bit_identically() -> None:
    whole = train(task(train=Noisy()), epochs=4)
    half = train(task(train=Noisy()), epochs=2)
    rest = train(task(train=Noisy()), epochs=4, resume=half.run)
    assert same(whole.model, rest.model)
    assert same(whole.model, train(task(train=Noisy()), epochs=4).model)


def test_a_short_run_has_curves_too() -> None:
    result = train(task(), epochs=1)
    store = Store("runs")
    assert store.series(result.run, "train/loss").steps == [7]
    assert store.series(result.run, "valid/loss").steps == [7]


def test_the_learning_rate_told_is_the_one_used() -> None:
    own = task(optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    result = train(own, optimizer={}, epochs=1)
    assert Store("runs").series(result.run, "train/lr").values == [0.5]


def test_a_fault_in_showing_samples_does_not_undo_the_training() -> None:
    def broken(_model: nn.Module) -> list[dict[str, str]]:
        raise ZeroDivisionError("in samples")

    result = train(task(samples=broken), epochs=1)
    assert result.status == "done"
    told = [event.message for event in Store("runs").events(result.run)]
    assert told == ["the report shows no samples: ZeroDivisionError: in samples"]


def test_a_model_that_cannot_be_built_leaves_no_run_behind(tmp_path: Path) -> None:
    done = command("train", "data.name=wine", "model.name=cnn", folder=tmp_path)
    assert done.returncode == 2
    assert "models that fit" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_recomputing_gives_a_ready_model_back_as_it_came() -> None:
    ready = model()
    train(task(model=ready), recompute=True, epochs=1)
    assert all("forward" not in vars(module) for module in ready.modules())


def test_a_damaged_run_is_said_in_one_line(tmp_path: Path) -> None:
    assert command("train", *DIGITS, "epochs=1", "-q", folder=tmp_path).returncode == 0
    folder = tmp_path / "runs" / "classify-0001"
    fitted = (folder / "fitted.json").read_text()
    for text, message in (("{", "cannot be read"), ("[]", "must hold one JSON object")):
        (folder / "fitted.json").write_text(text)
        done = command("eval", "last", folder=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
    (folder / "fitted.json").write_text(fitted)
    newest = max((folder / "checkpoints").glob("step-*"))
    (newest / "state.json").write_text("{}")
    done = command("eval", "last", folder=tmp_path)
    assert done.returncode == 2
    assert "no whole checkpoint" in done.stderr
    assert "torn" in done.stderr
    (folder / "config.yaml").unlink()
    done = command("eval", "last", folder=tmp_path)
    assert done.returncode == 2
    assert "never began to train" in done.stderr


def test_an_early_stop_can_be_lifted_on_resume() -> None:
    stuck = {"name": "sgd", "lr": 1e-9}
    first = train(task(), optimizer=stuck, stop={"patience": 1}, epochs=9)
    assert "no improvement" in first.reason
    second = train(task(), resume=first.run, optimizer=stuck, stop={"patience": None}, epochs=5)
    assert second.reason == "5 epochs done"


def test_plateau_lowers_the_rate() -> None:
    slow = {"name": "plateau", "patience": 1, "factor": 0.5}
    flat = {"name": "sgd", "lr": 1e-9}
    result = train(task(), optimizer=flat, schedule=slow, epochs=4)
    rates = Store("runs").series(result.run, "train/lr").values
    assert rates[-1] < 1e-9


def test_json_of_a_finished_run_can_be_read_again(tmp_path: Path) -> None:
    done = last_json(command("train", *DIGITS, "epochs=1", "--json", "-q", folder=tmp_path))
    again = last_json(command("train", "--resume", "last", "--json", "-q", folder=tmp_path))
    assert again["metrics"] == done["metrics"]
    text = (tmp_path / "runs/classify-0001/evaluation.json").read_text()
    assert "confusion" in text, "what the report shows is not lost"
