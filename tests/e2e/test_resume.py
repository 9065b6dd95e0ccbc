"""A killed run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from .command import DEADLINE, DIGITS, echelon, final_weights, last_json, shelf, start, wait_for

EVERY = "checkpoint.every=5"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert echelon("train", *DIGITS, EVERY, "-q", folder=folder).returncode == 0
    return final_weights(folder)


def assert_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("cut", [5, 25])
def test_kill_9_and_resume_ends_on_identical_weights(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], cut: int
) -> None:
    with start("train", *DIGITS, EVERY, "-q", folder=tmp_path) as victim:
        wait_for(lambda: max(shelf(tmp_path).versions(), default=0) >= cut, victim)
        os.kill(victim.pid, signal.SIGKILL)
    listed = echelon("runs", "list", folder=tmp_path).stdout
    assert "lost" in listed
    done = last_json(echelon("train", "--resume", "last", "--json", "-q", folder=tmp_path))
    assert done["steps"] == 69
    assert done["samples"] == 3 * 1438
    assert_identical(final_weights(tmp_path), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], number: signal.Signals
) -> None:
    with start("train", *DIGITS, EVERY, "-q", folder=tmp_path) as stopped:
        wait_for(lambda: shelf(tmp_path).versions(), stopped)
        os.kill(stopped.pid, number)
        output, errors = stopped.communicate(timeout=DEADLINE)
    assert stopped.returncode == 130, errors
    assert f"stopped by {number.name}" in output
    assert "python -m echelon train --resume classify-0001" in output
    assert "Traceback" not in errors
    last_json(echelon("train", "--resume", "classify-0001", "--json", "-q", folder=tmp_path))
    assert_identical(final_weights(tmp_path), undisturbed)


def test_a_corrupt_last_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    half = [*DIGITS, "steps=40"]
    assert echelon("train", *half, EVERY, "-q", folder=tmp_path).returncode == 0
    versions = shelf(tmp_path).versions()
    torn = tmp_path / f"runs/classify-0001/checkpoints/step-{versions[-1]:010d}/state.json"
    torn.write_text(torn.read_text()[:-10])
    done = echelon("train", "--resume", "last", "steps=null", "-q", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_identical(final_weights(tmp_path), undisturbed)
    assert "torn" in echelon("runs", "show", "last", folder=tmp_path).stdout


def test_what_may_not_change_on_resume_is_refused(tmp_path: Path) -> None:
    assert echelon("train", *DIGITS, "epochs=1", "-q", folder=tmp_path).returncode == 0
    for setting, word in (("seed=1", "seed"), ("model.dropout=0.1", "model")):
        done = echelon("train", "--resume", "last", setting, folder=tmp_path)
        assert done.returncode == 2
        assert f"began with {word}" in done.stderr
    done = echelon("train", "job.yaml", "--resume", "last", folder=tmp_path)
    assert done.returncode == 2
    assert "leave out job.yaml" in done.stderr
    done = echelon("train", "--resume", "clasify-0001", folder=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'classify-0001'?" in done.stderr


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    assert echelon("train", *DIGITS, "epochs=1", "-q", folder=tmp_path).returncode == 0
    done = last_json(
        echelon("train", "--resume", "last", "epochs=2", "--json", "-q", folder=tmp_path)
    )
    assert done["samples"] == 2 * 1438
