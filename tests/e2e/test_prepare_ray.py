"""A recipe on Ray: on a cluster of two nodes, and on one that is started for it."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.data.prepare import engine, prepare

from .command import echelon, last_json
from .test_prepare import files

# Ray is imported in processes of its own: here it would leave threads and sockets behind.
pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.timeout(300),
]
SECONDS = 240.0
TRIAL = Path(__file__).with_name("ray_trial.py")
SMALL = 4096
"""Bytes of a block."""
MARK = "echelon-ray-"
RECIPE: dict[str, Any] = {
    "read": "raw/*.tsv*",
    "columns": {"label": "string", "text": "string"},
    "clean": [
        {"kind": "length", "column": "text", "min": 3},
        {"kind": "duplicates", "columns": ["text"]},
    ],
    "split": {"by": "stratified", "column": "label", "train": 0.8, "test": 0.2},
    "features": [
        {"kind": "tfidf", "from": "text", "to": "x", "vocabulary": {"size": 100}},
        {"kind": "classes", "from": "label", "to": "y"},
    ],
    "write": {"folder": "prepared", "shards": 2},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Files that workers read and one that they are given, with a bad row and repeated texts."""
    lots = random.Random(0)
    words = [f"word{at}" for at in range(300)]
    rows = [f"{lots.choice('abc')}\t{' '.join(lots.choices(words, k=8))}\n" for _ in range(600)]
    rows += rows[:50]
    (tmp_path / "raw").mkdir()
    for part in range(13):
        text = "label\ttext\n" + "".join(rows[part * 50 : part * 50 + 50])
        (tmp_path / "raw" / f"{part:02d}.tsv").write_text(text + "bad\n" * (part == 3))
    packed = gzip.compress((tmp_path / "raw" / "12.tsv").read_bytes())
    (tmp_path / "raw" / "12.tsv").unlink()
    (tmp_path / "raw" / "12.tsv.gz").write_bytes(packed)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    return tmp_path


def test_a_cluster_prepares_what_one_process_does(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / "ray").mkdir()  # where it notes its address; else in a place that all users share
    done = subprocess.run(
        [sys.executable, str(TRIAL), "recipe.yaml", str(SMALL)],
        cwd=job,
        env={**os.environ, "RAY_TMPDIR": str(job)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    seen = last_json(done)
    assert seen["killed"] == 1, "a worker, at its work"
    assert seen["nodes"] == 2, "each has a worker"
    assert not seen["left"], "neither workers nor the connection"
    assert seen["bad"] == "DataError: raw/03.tsv:52: 1 cell, but there are 2 columns"
    assert "this process is on a Ray cluster already, not on local" in seen["other"]
    assert "does not see /nowhere: prepare into a folder that all machines" in seen["nowhere"]
    assert seen["kept"], "a connection that somebody else made"
    assert not _processes(seen["mark"])
    monkeypatch.setattr(engine, "SIZE", SMALL)
    assert seen["out"] == {"read": 1, "clean.1 duplicates": 50}
    assert files(job / "prepared") == _made_alone(job)


def test_one_that_is_started_for_it_is_gone_with_it(job: Path) -> None:
    command = [sys.executable, "-m", "echelon", "data", "prepare", "recipe.yaml"]
    with subprocess.Popen(
        [*command, "--on", "ray:local", "--workers", "1"],
        cwd=job,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _await_work(job / ".prepared.work" / "clean-0", process)
            mine = _processes(MARK)
            heard = _listening(mine)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert mine
    assert heard
    assert all(address in ("0100007F", "0000000000000000FFFF00000100007F") for address in heard)
    assert not _processes(MARK)
    assert not list(Path("/tmp").glob(f"{MARK}*"))
    assert not output
    assert [line for line in errors.splitlines() if not line.startswith("read")] == [
        "echelon: stopped; the same command goes on from here"
    ]
    done = echelon("data", "prepare", "recipe.yaml", "--workers", "2", folder=job)
    assert done.returncode == 0, done.stderr
    assert files(job / "prepared") == _made_alone(job)


def _made_alone(job: Path) -> dict[str, bytes]:
    """What one process makes of the recipe."""
    (job / "prepared").rename(job / "before")
    prepare(RECIPE, workers=1)
    return files(job / "prepared")


def _await_work(stage: Path, process: subprocess.Popen[str]) -> None:
    """Until something of this stage is done."""
    deadline = time.monotonic() + SECONDS
    while not any(stage.glob("*.json")):
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def _processes(mark: str) -> list[int]:
    """Those that have `mark` in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def _listening(processes: list[int]) -> set[str]:
    """Addresses that these listen at, as the kernel writes them."""
    sockets = set()
    for pid in processes:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(str(entry.readlink()))
            except OSError:
                continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found
