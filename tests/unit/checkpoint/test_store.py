"""The checkpoints of a run: which ones are kept, and how damaged ones are detected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import Shelf, read_cut, verify_cut, write_cut
from echelon.core.errors import CheckpointError, RunError


def state(version: int) -> dict[str, object]:
    return {"version": version, "w": torch.full((4,), float(version))}


def test_keeps_the_last_few_and_the_best(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=2)
    for version in range(1, 6):
        shelf.save(version, state(version))
        if version == 2:
            shelf.mark_best(version)
    assert shelf.versions() == [2, 4, 5]
    assert shelf.best() == 2
    assert shelf.load("best")["version"] == 2
    assert shelf.load("last")["version"] == 5
    assert shelf.load("4")["version"] == 4


def test_an_unknown_checkpoint_is_refused_with_the_choices(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.save(3, state(3))
    with pytest.raises(RunError, match=r"checkpoint 'best' is unknown.*choices: 3, last"):
        shelf.load("best")


def test_falls_back_to_the_one_before_a_corrupt_one_and_says_so(tmp_path: Path) -> None:
    notices: list[str] = []
    shelf = Shelf(tmp_path, notice=notices.append)
    shelf.save(1, state(1))
    torn = shelf.save(2, state(2)) / "tensors.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    assert shelf.load()["version"] == 1
    assert "fails its checksum" in notices[0]


def test_going_on_from_an_older_cut_outlives_the_broken_newer_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=1)
    shelf.save(30, state(30))
    shelf.mark_best(30)
    shelf.save(40, state(40))
    (tmp_path / "step-0000000040" / "state.json").write_text("{")
    assert shelf.load()["version"] == 30
    shelf.save(31, state(31))
    assert shelf.versions() == [30, 31]
    assert shelf.load()["version"] == 31


def test_an_old_cut_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    notices: list[str] = []
    (tmp_path / "step-0000000001").write_text("not a folder")
    shelf = Shelf(tmp_path, keep=1, notice=notices.append)
    shelf.save(2, state(2))
    assert "step-0000000001 could not be removed" in notices[0]
    assert shelf.load()["version"] == 2


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-foo").mkdir()
    (tmp_path / "best").mkdir()
    shelf = Shelf(tmp_path)
    shelf.save(1, state(1))
    assert shelf.versions() == [1]
    assert shelf.best() is None


def test_no_whole_checkpoint_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no whole checkpoint"):
        Shelf(tmp_path).load()


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    cut = tmp_path / "cut"
    write_cut(cut, state(1))
    whole = (cut / name).read_bytes()
    (cut / name).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"torn: {name} has"):
        read_cut(cut)
    (cut / name).unlink()
    with pytest.raises(CheckpointError, match=f"torn: {name} is missing"):
        read_cut(cut)


def test_a_foreign_or_broken_manifest_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    write_cut(cut, state(1))
    manifest = json.loads((cut / "manifest.json").read_text())
    (cut / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        verify_cut(cut)
    (cut / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no valid manifest"):
        verify_cut(cut)


def test_a_cut_is_whole_or_absent_when_its_writer_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from pathlib import Path; from echelon.checkpoint import Shelf\n"
        "shelf = Shelf(Path(sys.argv[1]), keep=3); print('ready', flush=True)\n"
        "for v in range(1, 10**6): shelf.save(v, {'version': v, 'w': torch.full((50_000,), v)})\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer:
        assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("step-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(writer.pid, signal.SIGKILL)
    shelf = Shelf(tmp_path, keep=3)
    assert shelf.versions(), "it was killed after it had saved"
    for version in shelf.versions():
        found = read_cut(tmp_path / f"step-{version:010d}")
        assert torch.equal(found["w"], torch.full((50_000,), version))
    shelf.save(10**7, state(10**7))
    assert not list(tmp_path.glob(".writing-*")), "what the killed writer left is swept away"


def test_a_cut_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_cut(blocked / "cut", state(1))
    assert blocked.read_text() == "in the way"
