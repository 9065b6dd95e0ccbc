"""The proof of a run, through kills, resumes and damage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.data.journal import JOURNAL, entries
from echelon.loop.journal import audit

from .command import echelon, shelf, start, wait_for
from .test_api import pairs, task, train

pytestmark = pytest.mark.timeout(300)

SAMPLES, BATCH, STEPS = 1438, 50, 29
PLAIN = [
    "task=classify",
    "data.name=digits",
    "model={name: mlp, hidden: [16]}",
    f"batch_size={BATCH}",
    "threads=1",
    "track.report=false",
    "evaluate.every=never",
    "-q",
]


def journal(folder: Path, run: str = "classify-0001") -> Path:
    return folder / "runs" / run / JOURNAL


def last_commit(folder: Path) -> int:
    found = [entry["last"] for entry in entries(journal(folder)) if entry["kind"] == "committed"]
    return found[-1] if found else 0


def verified(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return echelon("runs", "ledger", "last", "--verify", *options, folder=folder)


def proof(folder: Path) -> dict[str, Any]:
    done = verified(folder, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_kill_in_the_middle_of_an_epoch_and_a_resume_are_exactly_once(tmp_path: Path) -> None:
    endless = ["epochs=1000000", "checkpoint.every=301"]
    with start("train", *PLAIN, *endless, folder=tmp_path) as victim:
        # The journal is ahead of the checkpoint: what it says of the time between was in vain.
        wait_for(lambda: shelf(tmp_path).versions(), victim)
        wait_for(lambda: last_commit(tmp_path) > shelf(tmp_path).versions()[-1], victim)
        alive = verified(tmp_path)
        os.kill(victim.pid, signal.SIGKILL)
    assert alive.returncode == 0, alive.stderr
    [told] = re.findall(r"version ([\d,]+)", alive.stdout.splitlines()[0])
    midway = int(told.replace(",", "")) % STEPS > 0  # by chance it may be where an epoch ends
    assert ("under way" in alive.stdout) == midway
    reached, saved = last_commit(tmp_path), shelf(tmp_path).versions()[-1]
    epochs = reached // STEPS + 2
    dead = audit(journal(tmp_path).parent, checkpoint=True)
    assert (dead.status, dead.version, dead.happenings, dead.problems) == (None, reached, [], [])

    # Two members with batches of another size go on with what one began.
    other = [f"epochs={epochs}", "batch_size=32", "strategy=all_reduce", "workers=2", "-q"]
    done = echelon("train", "--resume", "last", *other, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = verified(tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"exactly once: {epochs} epochs finished" in shown.stdout
    assert "resumed" in shown.stdout
    found = audit(journal(tmp_path).parent, checkpoint=True)
    assert [(e.once, e.twice, e.never) for e in found.epochs] == [(SAMPLES, 0, 0)] * epochs
    assert found.status == "done"
    assert len(found.members) > 1
    assert sum(found.members.values()) == epochs * SAMPLES
    rolled = [h.lost_steps for h in found.happenings if h.kind == "rolled_back"]
    assert rolled == ([reached - saved] if reached > saved else [])
    # Every checkpoint that is left was written down before it could be seen.
    assert max(shelf(tmp_path).versions()) == last_commit(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = echelon("train", *PLAIN, "epochs=3", "checkpoint.every=10", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def without(text: str, first: int, last: int) -> str:
    """The journal without the commits of these versions."""
    lines = [(json.loads(line).get("first", 0), line) for line in text.splitlines(True)]
    return "".join(line for version, line in lines if not first <= version <= last)


@pytest.mark.parametrize(
    ("damage", "code", "word"),
    [
        (lambda text: without(text, 41, 50), 1,
         "epoch 1: 500 samples never (positions 550 to 1,050)"),
        (lambda text: text.replace('"epoch":1,"start":550,', '"epoch":1,"start":500,'), 1,
         "epoch 1: 50 samples twice (positions 500 to 550)"),
        (lambda text: text.replace('"epoch":1,"start":550,', '"epoch":1,"start":5x0,'), 2,
         "is damaged: not JSON"),
        (lambda text: text[: text.rindex('{"kind":"committed"')], 1,
         "is newer than the journal's"),
        (lambda text: text.replace('"number":1', '"number":2'), 1,
         "generation 1 made updates and is not in the journal"),
    ],
    ids=["line removed", "range moved", "broken line", "end cut off", "generation"],
)  # fmt: skip
def test_a_damaged_journal_is_no_proof(
    finished: Path, damage: Callable[[str], str], code: int, word: str
) -> None:
    path = journal(finished)
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8")
    try:
        done = verified(finished)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert word in line
    assert "Traceback" not in done.stderr
    assert verified(finished).returncode == 0


def test_a_checkpoint_that_says_otherwise_is_told(finished: Path) -> None:
    """A journal that is whole in itself, and of another run."""
    path = journal(finished)
    text = path.read_text(encoding="utf-8")
    moved = {'"stop":550': '"stop":600', '"start":550': '"start":600'}
    path.write_text(re.sub(r'"st\w+":550', lambda m: moved[m.group()], text), encoding="utf-8")
    try:
        assert verified(finished).returncode == 0, "later checkpoints do not know where a step was"
        path.write_text(text.replace('"epoch":2', '"epoch":3'), encoding="utf-8")
        done = verified(finished)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert "epochs 2 to 2: all samples never (and 2 more)" in done.stderr
    assert "epoch 3: positions 0 to 1,438 are consumed at version 87 by the journal" in done.stdout


def test_a_run_from_before_there_were_journals(tmp_path: Path) -> None:
    done = echelon("train", *PLAIN, "steps=40", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    journal(tmp_path).unlink()
    for command in (["last"], ["last", "--verify"]):
        old = echelon("runs", "ledger", *command, folder=tmp_path)
        assert (old.returncode, old.stdout) == (2, "")
        assert "error: run 'classify-0001' has no journal" in old.stderr
    longer = ["steps=null", "epochs=3", "-q"]
    done = echelon("train", "--resume", "last", *longer, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = verified(tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "there was no journal up to version 40: a checkpoint is believed" in shown.stdout
    assert "exactly once: 3 epochs finished" in shown.stdout


def test_a_damaged_journal_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    assert echelon("train", *PLAIN, "epochs=1", folder=tmp_path).returncode == 0
    path = journal(tmp_path)
    path.write_text("nonsense\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    done = echelon("train", "--resume", "last", "epochs=2", "-q", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "line 1: is damaged"
        in done.stderr + echelon("runs", "show", "last", folder=tmp_path).stdout
    )
    assert path.with_name("journal.damaged.jsonl").exists()
    assert proof(tmp_path)["taken_over"] == STEPS


def test_samples_that_are_left_out_are_counted_apart(tmp_path: Path) -> None:
    x, y = pairs()
    x[5, 3] = torch.nan
    bad = task(train={"x": x, "y": y})
    first = train(bad, health={"non_finite": "skip"}, epochs=2)
    result = train(bad, health={"non_finite": "skip"}, epochs=3, resume=first.run)
    found = audit(result.folder, checkpoint=True)
    assert found.problems == []
    assert [(e.once, e.left_out, e.never) for e in found.epochs] == [(len(x) - 32, 32, 0)] * 3
    assert found.version == result.steps == 3 * 6
    shown = echelon("runs", "ledger", "last", folder=tmp_path).stdout
    assert "left out: 96 (their updates were not finite)" in shown


def test_a_run_that_fails_says_so_in_its_journal() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(8, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 9:
                raise ZeroDivisionError
            out: torch.Tensor = self.layer(x)
            return out

    with pytest.raises(ZeroDivisionError):
        train(task(model=Broken, valid=None), epochs=5)
    (folder,) = Path("runs").glob("*/")
    found = audit(folder, checkpoint=True)
    assert (found.status, found.version, found.problems) == ("failed", 9, [])
