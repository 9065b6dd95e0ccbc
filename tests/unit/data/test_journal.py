"""The journal is readable after its writer was killed, and a damaged line is reported by number."""

from __future__ import annotations

import inspect
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.data.journal import JOURNAL, Journal, JournalError, entries

# The file by itself: all of echelon.data would import torch first.
WRITER = """
import sys, pathlib, runpy
journal = runpy.run_path(sys.argv[1])["Journal"](pathlib.Path(sys.argv[2]))
for n in range(10**9):
    journal.add("stalled", member=n, text="é" * 200)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def test_lines_come_back_as_they_were_added(path: Path) -> None:
    before = time.time()
    with Journal(path) as journal:
        journal.add("begun", run="déjà-vu", samples=7)
        journal.sync()
        journal.add("finished", status="done", version=3)
    begun, finished = entries(path)
    assert {**begun, "time": 0} == {"kind": "begun", "time": 0, "run": "déjà-vu", "samples": 7}
    assert finished["kind"] == "finished"
    assert before - 1 < begun["time"] <= finished["time"] < time.time() + 1


def test_a_journal_that_was_never_begun_has_no_entries(path: Path) -> None:
    assert list(entries(path)) == []


def test_an_unfinished_last_line_is_dropped_and_cut_off_by_the_next_writer(path: Path) -> None:
    with Journal(path) as journal:
        journal.add("begun", samples=1)
    # Half of a long line, longer than what is looked at in one go.
    with path.open("ab") as file:
        file.write(b'{"kind":"stalled","time":1,"text":"' + b"x" * 200_000)
    assert [entry["kind"] for entry in entries(path)] == ["begun"]
    with Journal(path) as journal:
        journal.add("finished", version=0)
    assert [entry["kind"] for entry in entries(path)] == ["begun", "finished"]


def test_a_journal_of_half_a_line_is_empty(path: Path) -> None:
    path.write_bytes(b'{"kind":"beg')
    assert list(entries(path)) == []
    with Journal(path) as journal:
        journal.add("begun", samples=1)
    assert len(list(entries(path))) == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{nonsense", "not JSON"),
        (b'{"kind":"\xff"}', "not JSON"),
        (b"[1, 2]", "not an object with a kind"),
        (b'{"time":1}', "not an object with a kind"),
        (b'{"kind":"begun"}', "it has no time"),
        (b'{"kind":"begun","time":true}', "it has no time"),
    ],
)
def test_a_damaged_line_is_named(path: Path, line: bytes, what: str) -> None:
    path.write_bytes(b'{"kind":"begun","time":1}\n' + line + b'\n{"kind":"lost","time":2}\n')
    with pytest.raises(DataError, match=rf"{JOURNAL}, line 2: is damaged: {what}"):
        list(entries(path))


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened: No such file"):
        Journal(tmp_path / "nowhere" / JOURNAL)
    with pytest.raises(JournalError, match="cannot be gone on with: Invalid argument"):
        Journal(Path(os.devnull))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(entries(tmp_path))


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_half_line(path: Path) -> None:
    with Journal(path) as journal:
        journal.add("begun", samples=1)
        size = path.stat().st_size
        with files_up_to(size + 20), pytest.raises(JournalError, match="cannot be written: File"):
            journal.add("stalled", text="x" * 100)
        assert path.stat().st_size == size
        journal.add("finished", version=0)
    assert [entry["kind"] for entry in entries(path)] == ["begun", "finished"]


def test_a_sync_that_fails_is_said(path: Path) -> None:
    journal = Journal(path)
    with path.open("rb") as kept, open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), journal._handle)
        with pytest.raises(JournalError, match="cannot be synced: Invalid argument"):
            journal.sync()
        os.dup2(kept.fileno(), journal._handle)
    journal.close()
    journal.close()  # twice does no harm


@pytest.mark.timeout(120)
def test_every_line_of_a_killed_writer_is_whole(path: Path) -> None:
    source = inspect.getsourcefile(Journal)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(source), str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 100_000:
            assert writer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.kill()
        writer.wait()
    found = [entry["member"] for entry in entries(path)]
    assert found == list(range(len(found)))
    with Journal(path) as journal:
        journal.add("stalled", member=len(found))
    assert [entry["member"] for entry in entries(path)] == [*found, len(found)]
