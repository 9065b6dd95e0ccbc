"""Echelon from Python, with models and data that know nothing of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import echelon
from echelon.core.errors import ConfigError, NonFiniteError, RunError, TaskError
from echelon.track import Store
from tests.e2e.command import shelf

N = 200


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, 8, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As anybody would write it."""

    def __init__(self) -> None:
        self.x, self.y = pairs()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Named(Dataset[dict[str, torch.Tensor]]):
    """Rows as dicts, named as transformers name them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = pairs()
        return {"inputs_embeds": x[index], "labels": y[index]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def task(**parts: Any) -> echelon.Task:
    x, y = pairs()
    given: dict[str, Any] = {"model": model, "loss": echelon.cross_entropy}
    return echelon.Task(**{**given, "train": {"x": x, "y": y}, "valid": {"x": x, "y": y}, **parts})


def train(task: echelon.Task | str, **settings: Any) -> echelon.Result:
    usual: dict[str, Any] = {"epochs": 12, "optimizer": {"lr": 0.02}, "track": {"report": False}}
    return echelon.train(task, quiet=True, **{**usual, **settings})


def right(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    return (output.argmax(1) == batch["y"]).sum(), len(output)


def test_a_mapping_of_tensors_is_trained_on() -> None:
    result = train(task(metrics={"right": right}))
    assert result.metrics["right"] > 0.9
    assert result.steps == 12 * 7
    assert result.samples == 12 * N
    assert Store("runs").run(result.run).status == "done"


def test_a_plain_dataset_gives_the_same_weights_as_its_tensors() -> None:
    one, other = train(task()), train(task(train=Pairs()))
    for left, right_ in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right_)


def test_a_model_with_its_own_call_and_wrapped_output_is_taken_as_it_is() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, inputs_embeds: torch.Tensor, **_others: Any) -> Any:
            return type("Output", (), {"logits": self.inner(inputs_embeds)})()

    result = train(
        echelon.Task(
            model=Wrapped,
            forward=lambda net, batch: net(**batch),
            loss=lambda output, batch: echelon.cross_entropy(output, batch, target="labels"),
            train=Named(),
            valid=Named(),
        ),
        epochs=10,
    )
    assert result.metrics["loss"] < 0.4


def test_a_ready_model_and_a_users_optimizer_are_used() -> None:
    ready = model()
    before = ready[0].weight.clone()  # type: ignore[index]
    result = train(
        task(model=ready, optimizer=lambda p: torch.optim.Adadelta(p, lr=1.0)), optimizer={}
    )
    assert result.model is ready
    assert not torch.equal(before, ready[0].weight)  # type: ignore[index]
    with pytest.raises(ConfigError, match="brings its own optimizer"):
        train(task(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))


def test_resuming_goes_on_to_the_weights_of_an_unbroken_run() -> None:
    whole = train(task(), epochs=6)
    half = train(task(), epochs=3)
    rest = train(task(), epochs=6, resume=half.run)
    assert rest.run == half.run
    for left, right_ in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(left, right_)
    with pytest.raises(RunError, match="is unknown"):
        train(task(), resume="nothing")
    with pytest.raises(RunError, match="began with seed"):
        train(task(), resume=half.run, seed=5)


def test_accumulating_ends_on_the_same_weights() -> None:
    def plain() -> nn.Module:
        return nn.Linear(8, 2)

    one, other = train(task(model=plain)), train(task(model=plain), accumulate=5)
    for left, right_ in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(left, right_, rtol=1e-4, atol=1e-5)


def test_recomputing_runs_learn_too() -> None:
    assert train(task(), recompute=True).metrics["loss"] < 0.3


def test_an_observer_that_fails_never_stops_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError("disk full")

    result = echelon.train(
        task(), epochs=1, quiet=True, observers=[Broken()], track={"report": False}
    )
    assert result.status == "done"
    assert "disk full" in capsys.readouterr().err


def test_a_task_that_cannot_work_is_refused_in_one_line() -> None:
    with pytest.raises(TaskError, match="no training samples"):
        train(task(train=None))
    with pytest.raises(TaskError, match="it must be a function"):
        train(task(loss="cross_entropy"))
    with pytest.raises(TaskError, match="may not be called 'loss'"):
        train(task(metrics={"loss": right}))
    with pytest.raises(ConfigError, match="stop needs held-out samples"):
        train(task(valid=None), stop={"patience": 1})
    with pytest.raises(ConfigError, match="'plateau' needs held-out samples"):
        train(task(valid=None), schedule={"name": "plateau"})
    assert not Path("runs").exists(), "a mistake leaves no run behind"


def test_an_error_in_the_task_keeps_its_traceback_and_is_recorded() -> None:
    def broken(_output: torch.Tensor, _batch: Any) -> tuple[torch.Tensor, float]:
        raise ZeroDivisionError("in the user's loss")

    with pytest.raises(ZeroDivisionError, match="in the user's loss"):
        train(task(loss=broken))
    run = Store("runs").run("last")
    assert run.status == "failed"
    assert "in broken" in (run.folder / "error.txt").read_text(encoding="utf-8")


def test_evaluation_can_be_left_out_and_plateau_hears_it() -> None:
    assert train(task(valid=None), epochs=1).metrics == {}
    assert train(task(), evaluate={"every": "never"}, epochs=1).metrics == {}
    slow = {"name": "plateau", "patience": 1, "factor": 0.5}
    assert train(task(), schedule=slow, evaluate={"every": 5}).status == "done"


def test_a_non_finite_update_stops_the_run_or_is_left_out() -> None:
    x, y = pairs()
    x[5, 3] = torch.nan
    bad = {"train": {"x": x, "y": y}}
    with pytest.raises(NonFiniteError, match="input column 'x' is not finite"):
        train(task(**bad))
    assert Store("runs").run("last").status == "failed"
    result = train(task(**bad), health={"non_finite": "skip"}, epochs=3)
    assert result.steps == 3 * 6, "one batch of each epoch is left out"
    assert all(bool(p.isfinite().all()) for p in result.model.parameters())
    told = [event.message for event in Store("runs").events(result.run)]
    assert len(told) == 3
    assert "left out 32 samples" in told[0]


def test_a_result_is_plain_json_even_where_it_is_not_a_number() -> None:
    result = train(
        task(metrics={"nothing": lambda output, _batch: (output.sum() * 0, 0.0)}), epochs=1
    )
    assert json.loads(json.dumps(result.summary(), allow_nan=False))["metrics"]["nothing"] is None


def test_settings_that_a_python_task_would_ignore_are_refused() -> None:
    for idle in ({"model": {"name": "mlp"}}, {"data": {"path": "x.csv"}}):
        with pytest.raises(ConfigError):
            train(task(), **idle)
    assert train(task(), data={"prefetch": 0}, epochs=1).status == "done"


SCRIPT = """
import sys
import echelon

try:
    echelon.train("classify", data={"name": "digits"}, model={"name": "mlp"}, epochs=10**6,
                  workers=int(sys.argv[1]), strategy=sys.argv[2], quiet=True)
except echelon.Interrupted as stopped:
    print(stopped, stopped.result.steps)
    raise
print("the script continues")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("workers", "strategy"), [(1, "single"), (2, "all_reduce")])
def test_a_signal_raises_after_a_last_checkpoint(
    tmp_path: Path, number: signal.Signals, workers: int, strategy: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", str(workers), strategy]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        store = Store(tmp_path / "runs")
        deadline = time.monotonic() + 60
        while not any(run.step for run in store.runs()):
            assert script.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        script.send_signal(number)
        output, errors = script.communicate(timeout=60)
    assert script.returncode == 1, errors
    steps = int(output.split()[-1])
    assert output.startswith(
        f"stopped by {number.name} after {steps:,} steps; continue with resume"
    )
    assert "the script continues" not in output
    assert shelf(tmp_path).versions()[-1] == steps
