"""`echelon data prepare` as a person uses it: real files, real processes, real signals."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .command import echelon, last_json, start, wait_for
from .forks import Command

RECIPE = """\
read:
  - {path: "raw/*.tsv.gz", header: true}
  - {path: raw/test.csv, split: test}
columns: {label: string, text: string}
clean:
  - {kind: length, column: text, min: 3}
split: {by: stratified, column: label, train: 0.9, valid: 0.1}
features:
  - {kind: classes, from: label, to: y}
keep: [text]
write: {folder: prepared, shards: 3}
"""
ROWS = 6000


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A compressed tsv and a csv, with something wrong in each."""
    lots = random.Random(0)
    words = [f"word{at}" for at in range(500)]
    rows = [
        (lots.choice(["good", "bad"]), " ".join(lots.choices(words, k=30))) for _ in range(ROWS)
    ]
    (tmp_path / "raw").mkdir()
    text = "label\ttext\n" + "".join(f"{label}\t{words}\n" for label, words in rows) + "lost\n"
    (tmp_path / "raw" / "train.tsv.gz").write_bytes(gzip.compress(text.encode(), 1))
    table = "label,text\n" + "".join(f'{label},"{words}"\n' for label, words in rows[:500])
    (tmp_path / "raw" / "test.csv").write_text(table + "good,x\nodd,unseen before\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def prepared(job: Path, workers: int, folder: str) -> Command:
    return start(
        *("data", "prepare", "recipe.yaml", f"write.folder={folder}", "--json", "-q"),
        *("--workers", str(workers)),
        folder=job,
    )


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def killed_in_the_middle(job: Path) -> list[int]:
    """A command that dies as soon as there is something on its desk; its workers' numbers."""
    done, begun = job / "killed" / "prepared.json", ".killed.work/clean-0/*.json"
    while True:
        with prepared(job, 2, "killed") as command:
            wait_for(lambda: done.exists() or list(job.glob(begun)), command)
            workers = children(command.pid)
            with suppress(ProcessLookupError):
                os.kill(command.pid, signal.SIGKILL)
        if not (job / "killed").exists():
            assert len(workers) == 2
            return workers
        shutil.rmtree(job / "killed")  # this machine was too busy to be quick enough


@pytest.mark.timeout(180)
def test_it_is_the_same_whoever_does_it_and_however_often(job: Path) -> None:
    done = last_json(echelon("data", "prepare", "recipe.yaml", "-w", "1", "--json", folder=job))
    assert done["counts"]["read"] == ROWS + 1 + 502
    assert done["counts"]["out"] == {"read": 1, "clean.0 length": 1, "features.0 classes": 1}
    assert {name: facts["rows"] for name, facts in done["splits"].items()} == {
        "train": 5400,
        "valid": 600,
        "test": 500,
    }
    outs = [json.loads(s) for s in (job / "prepared/quarantine.jsonl").read_text().splitlines()]
    assert [(Path(o["file"]).name, o["line"], o["step"]) for o in outs] == [
        ("train.tsv.gz", ROWS + 2, "read"),
        ("test.csv", 502, "clean.0 length"),
        ("test.csv", 503, "features.0 classes"),
    ]
    whole = files(job / "prepared")
    with prepared(job, 3, "by-3") as command:
        assert command.communicate(120)[1] == ""
    assert files(job / "by-3") == whole
    workers = killed_in_the_middle(job)
    deadline = time.monotonic() + 20
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    assert (job / ".killed.work").exists()
    with prepared(job, 2, "killed") as command:
        assert command.communicate(120)[1] == ""
    assert files(job / "killed") == whole
    assert not (job / ".killed.work").exists()


@pytest.mark.timeout(120)
def test_ctrl_c_ends_it_and_it_can_go_on(job: Path) -> None:
    with prepared(job, 2, "out") as command:
        wait_for(lambda: len(children(command.pid)) == 2, command)
        workers = children(command.pid)
        wait_for(lambda: (job / ".out.work/schema.arrow").exists(), command)
        os.kill(command.pid, signal.SIGINT)
        output, errors = command.communicate(60)
        assert command.returncode == 130, errors
    assert errors.strip() == "echelon: stopped; the same command goes on from here"
    assert output == ""
    assert not any(map(alive, workers))
    done = last_json(
        echelon("data", "prepare", "recipe.yaml", "write.folder=out", "-w1", "--json", folder=job)
    )
    assert done["fresh"]


@pytest.mark.timeout(60)
def test_mistakes_are_one_line(job: Path) -> None:
    def said(*arguments: str) -> str:
        done = echelon("data", "prepare", *arguments, "-q", "--workers", "1", folder=job)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line

    assert said("nothing.yaml") == "error: nothing.yaml: there is no such file"
    assert said("recipe.yaml", "keep=[txt]").startswith(
        "error: command line: keep: column 'txt' is unknown; did you mean 'text'"
    )
    assert said("recipe.yaml", "columns.label=txt").startswith(
        "error: command line: columns.label = 'txt': not a type; such as int64"
    )
    assert said("recipe.yaml", "bad=refuse").startswith("error: raw/train.tsv.gz:6002: ")
    assert "recipe.yaml/.x.work: Not a directory" in said(
        "recipe.yaml", "write.folder=recipe.yaml/x"
    )
    (job / "recipe.yaml").write_text(RECIPE.replace("kind: classes", "kind: clases"))
    assert said("recipe.yaml").startswith(
        "error: recipe.yaml:9: features.0: kind of feature 'clases' is unknown; did you mean"
    )
    assert not list(job.glob(".*"))


@pytest.mark.timeout(60)
def test_the_end_of_a_damaged_file_is_told(job: Path) -> None:
    packed = job / "raw/train.tsv.gz"
    packed.write_bytes(packed.read_bytes()[:-2000])
    done = echelon("data", "prepare", "recipe.yaml", "-w", "1", "-q", folder=job)
    assert done.returncode == 0, done.stderr
    assert "1 empty or damaged file: 1 or more" in done.stdout
    assert "raw/train.tsv.gz: truncated: its packed stream has no end (after " in done.stdout
    assert "may be wrong" not in done.stdout
    whole = json.loads((job / "prepared/prepared.json").read_text())
    counts = whole["counts"]
    assert 0 < counts["kept"] == counts["read"] - sum(counts["out"].values())
    outs = [json.loads(s) for s in (job / "prepared/quarantine.jsonl").read_text().splitlines()]
    (damage,) = [out for out in outs if "truncated" in out["reason"]]
    assert Path(damage["file"]).name == "train.tsv.gz"


@pytest.mark.timeout(60)
def test_records_of_a_damaged_stream_are_doubtful(job: Path) -> None:
    """A wrong byte in the middle is found at the end: what was read before is told by its file."""
    packed = job / "raw/train.tsv.gz"
    content = bytearray(packed.read_bytes())
    content[-8] ^= 0xFF  # of the checksum: nothing that is read changes
    packed.write_bytes(content)
    for number in range(4):
        (job / f"raw/train-{number}.tsv").touch()
    empties = ", ".join(f"raw/train-{number}.tsv" for number in range(4))
    more = (f"read=[raw/train.tsv.gz, {empties}]", "split={by: ratio, train: 0.5, valid: 0.5}")
    done = echelon("data", "prepare", "recipe.yaml", *more, "-w", "1", "-q", folder=job)
    assert done.returncode == 0, done.stderr
    facts = json.loads((job / "prepared/prepared.json").read_text())
    first, *empty = facts["damaged"]
    assert Path(first["file"]).name == "train.tsv.gz"
    assert facts["counts"]["out"] == {"file": 1}
    assert first["doubtful"] == facts["counts"]["read"] - 1 == facts["counts"]["kept"] > 5000
    assert [one["reason"] for one in empty] == ["empty"] * 4
    assert f"; {first['doubtful']:,} records read from it before may be wrong\n" in done.stdout
    assert "5 empty or damaged files: 1 or more" in done.stdout
    assert "raw/train-1.tsv: empty\n  and 2 more\n" in done.stdout


@pytest.mark.timeout(60)
def test_doubtful_labels_are_told_with_the_file_that_has_them(job: Path) -> None:
    words = {"good": "fine nice great", "bad": "poor sad awful"}
    rows = [f"{label},{text} {at}\n" for at in range(100) for label, text in words.items()]
    (job / "few.csv").write_text("".join(["label,text\n", *rows, "bad,nice fine great\n"]))
    more = ("read=few.csv", "clean=[{kind: noise, label: label, column: text}]")
    done = echelon("data", "prepare", "recipe.yaml", *more, "-w", "1", "-q", folder=job)
    assert done.returncode == 0, done.stderr
    assert " 1 (clean.0 noise: 1); kept, see prepared/noted.jsonl\n" in done.stdout
    (noted,) = [json.loads(s) for s in (job / "prepared/noted.jsonl").read_text().splitlines()]
    assert noted["line"] == len(rows) + 2


@pytest.mark.timeout(60)
def test_a_full_disk_is_one_line_and_no_loss(job: Path) -> None:
    """A limit on the size of files stands for the end of a disk."""
    limited = subprocess.run(
        [
            *("bash", "-c", 'ulimit -f 200; exec "$@"', "-", sys.executable, "-m", "echelon"),
            *("data", "prepare", "recipe.yaml", "-q", "-w", "1"),
        ],
        cwd=job,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert limited.returncode == 2, limited.stderr
    (line,) = limited.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("File too large")
    done = last_json(echelon("data", "prepare", "recipe.yaml", "-w1", "--json", folder=job))
    assert done["fresh"]
