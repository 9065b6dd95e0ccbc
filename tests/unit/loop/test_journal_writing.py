"""The first member writes the journal of a run that has no coordinator."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from echelon.core.types import Lease
from echelon.data.journal import JOURNAL, entries
from echelon.data.ledger import Ledger
from echelon.data.proof import Account, account, replay
from echelon.loop import journal
from echelon.loop.journal import Clerk

ABOUT: dict[str, Any] = {"run": "digits-0001", "samples": 100, "batch_size": 10, "seed": 0}
ONE = {"members": 1, "parts": 1}


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(100)


@pytest.fixture
def clerk(tmp_path: Path, ledger: Ledger, told: list[str]) -> Iterator[Clerk]:
    with closing(Clerk(tmp_path, ledger, told.append)) as found:
        yield found


def steps(ledger: Ledger, version: int, count: int) -> int:
    for _, lease in zip(range(count), ledger.leases(0, 10), strict=False):
        version += 1
        ledger.commit(lease, version)
    ledger.give_back_all()
    return version


def kinds(folder: Path) -> list[str]:
    return [entry["kind"] for entry in entries(folder / JOURNAL)]


def proof(folder: Path) -> Account:
    return account(replay(folder / JOURNAL))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    size = (folder / JOURNAL).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_written_now_and_then_and_when_it_has_to_be(
    tmp_path: Path, clerk: Clerk, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "EVERY", 3600.0)
    clerk.begun(ABOUT, members=2, parts=2)
    clerk.tick()
    version = steps(ledger, 0, 3)
    clerk.tick()
    start = ["begun", "joined", "joined", "generation"]
    assert kinds(tmp_path) == start
    clerk._next -= 3600.0
    clerk.tick()
    clerk.tick()
    assert kinds(tmp_path) == [*start, "committed"]
    steps(ledger, version, 2)
    clerk.keep()
    clerk.finished("done", 5)
    assert kinds(tmp_path) == [*start, "committed", "committed", "finished"]
    found = proof(tmp_path)
    assert (found.version, found.members, found.problems) == (5, {0: 25, 1: 25}, [])


def test_a_full_disk_is_told_once_and_made_up_for(
    tmp_path: Path, clerk: Clerk, ledger: Ledger, told: list[str]
) -> None:
    clerk.begun(ABOUT, **ONE)
    version = 0
    for _ in range(2):
        with full_disk(tmp_path):
            for _ in range(3):
                version = steps(ledger, version, 1)
                clerk.keep()
        clerk.keep()
    assert len(told) == 2
    assert "cannot be written: File too large; training goes on" in told[0]
    assert proof(tmp_path).epochs[0].once == 60
    assert proof(tmp_path).problems == []


def gone_on(folder: Path, ledger: Ledger, version: int, left_out: list[Lease]) -> Account:
    """A new process resumes from a checkpoint and trains to the end of the epoch."""
    again = Ledger(100)
    again.load_state_dict(ledger.state_dict())
    notes: list[str] = []
    with closing(Clerk(folder, again, notes.append)) as clerk:
        clerk.resumed(ABOUT, version, left_out, **ONE)
        clerk.finished("done", steps(again, version, 99))
    return proof(folder)


def test_what_a_checkpoint_does_not_hold_is_undone(
    tmp_path: Path, clerk: Clerk, ledger: Ledger
) -> None:
    clerk.begun(ABOUT, **ONE)
    version = steps(ledger, 0, 4)
    saved = Ledger(100)
    saved.load_state_dict(ledger.state_dict())
    steps(ledger, version, 3)
    clerk.keep()
    found = gone_on(tmp_path, saved, version, [])
    assert (found.epochs[0].once, found.problems, found.generations) == (100, [], 2)
    assert [h.kind for h in found.happenings] == ["rolled_back", "resumed"]
    assert found.failures[0].lost_steps == 3


def test_what_was_left_out_after_a_checkpoint_of_the_same_version_is_undone_too(
    tmp_path: Path, clerk: Clerk, ledger: Ledger
) -> None:
    clerk.begun(ABOUT, **ONE)
    version = steps(ledger, 0, 4)
    saved = Ledger(100)
    saved.load_state_dict(ledger.state_dict())
    ledger.leave_out(next(ledger.leases(0, 10)), version)
    clerk.keep()
    assert proof(tmp_path).epochs[0].left_out == 10
    found = gone_on(tmp_path, saved, version, [])
    assert (found.epochs[0].once, found.epochs[0].left_out, found.problems) == (100, 0, [])


def test_what_was_left_out_before_a_checkpoint_stays_so(
    tmp_path: Path, clerk: Clerk, ledger: Ledger
) -> None:
    clerk.begun(ABOUT, **ONE)
    version = steps(ledger, 0, 4)
    lease = next(ledger.leases(0, 10))
    ledger.leave_out(lease, version)
    clerk.finished("stopped", version)
    found = gone_on(tmp_path, ledger, version, [lease])
    assert (found.epochs[0].once, found.epochs[0].left_out, found.problems) == (90, 10, [])
    assert [h.kind for h in found.happenings] == ["resumed"], "nothing was undone"


def test_a_checkpoint_that_is_newer_than_the_journal_is_believed(
    tmp_path: Path, clerk: Clerk, ledger: Ledger
) -> None:
    clerk.begun(ABOUT, **ONE)
    version = steps(ledger, 0, 4)  # a power cut took these lines
    ledger.drain()
    found = gone_on(tmp_path, ledger, version, [])
    assert (found.taken_over, found.epochs[0].once, found.problems) == (4, 100, [])
    older = Ledger(100)
    steps(older, 0, 2)
    older.drain()
    found = gone_on(tmp_path, older, 2, [])
    assert (found.taken_over, found.epochs[0].once, found.problems) == (2, 100, [])


def test_a_journal_that_cannot_be_read_is_put_aside(
    tmp_path: Path, clerk: Clerk, ledger: Ledger, told: list[str]
) -> None:
    (tmp_path / JOURNAL).write_text("nonsense\n")
    version = steps(ledger, 0, 4)
    ledger.drain()
    clerk.resumed(ABOUT, version, [], **ONE)
    assert (tmp_path / journal.DAMAGED).read_text() == "nonsense\n"
    assert "line 1: is damaged: not JSON; it is kept as journal.damaged.jsonl" in told[0]
    assert proof(tmp_path).taken_over == 4
