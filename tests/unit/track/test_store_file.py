"""The store's file: made by many at once, damaged, locked, older and newer."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from echelon.track import Point, Store, StoreError
from echelon.track import store as schema

_WRITER = """
import sys
from echelon.track import Point, Store
store = Store(sys.argv[1])
run = store.create("digits", {}, {})
for batch in range(20):
    store.add_points(run, [Point(100 * batch + i, "train/loss", 0.5, 1.0) for i in range(100)])
store.finish(run, "done", {"steps": 2000})
print(run)
"""

_FORKER = """
import os, sys
from echelon.track import Store
store = Store(sys.argv[1])
run = store.create("digits", {}, {})
child = os.fork()
if child == 0:
    store.add_event(run, 1, "child")
    os._exit(0)
os.waitpid(child, 0)
store.add_event(run, 2, "parent")
print(run)
"""


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_many_processes_make_and_fill_one_store_at_once(store: Store) -> None:
    writers = [_start(_WRITER, str(store.folder)) for _ in range(4)]
    ids = sorted(writer.communicate(timeout=60)[0].strip() for writer in writers)
    assert ids == [f"digits-000{n}" for n in (1, 2, 3, 4)]
    for run in ids:
        assert len(store.series(run, "train/loss").steps) == 2000
        assert store.run(run).status == "done"


def test_the_store_uses_a_write_ahead_log(store: Store) -> None:
    store.create("digits", {}, {})
    with schema.connected(store.path) as file:
        assert file.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    run = store.create("digits", {}, {})
    wrong = Point(2, "train/loss", "two", 0.0)  # type: ignore[arg-type]
    missing = Point(3, None, 1.0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        store.add_points(run, [Point(1, "train/loss", 1.0, 0.0), wrong, missing])
    assert store.names(run) == []


def test_a_corrupt_store_is_named_and_does_not_stop_a_run(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.create("digits", {}, {})
    store.path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StoreError, match=r"echelon\.db: the run store cannot be used: file is not"):
        store.runs()
    assert store.create("digits", {}, {}) == "digits-0002"
    assert "this run is not recorded" in capsys.readouterr().err


def test_a_store_locked_for_too_long_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = store.create("digits", {}, {})
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            store.add_event(run, 1, "lost")
        assert store.create("digits", {}, {}) == "digits-0002"
    assert "database is locked; this run is not recorded" in capsys.readouterr().err
    store.add_event(run, 2, "kept")
    assert [event.message for event in store.events(run)] == ["kept"]


def test_switching_to_the_log_waits_for_others_and_then_gives_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.mkdir()
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (x)")
        other.execute("BEGIN EXCLUSIVE")
        with (
            pytest.raises(StoreError, match="locked"),
            schema.connected(store.path),
        ):
            pass


def test_a_store_of_a_newer_echelon_is_left_alone(store: Store) -> None:
    store.create("digits", {}, {})
    with closing(sqlite3.connect(store.path)) as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"newer Echelon \(version 99 of the store, this one"):
        store.runs()


def test_an_older_store_is_brought_up_to_date(
    trained: Callable[..., str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained()
    added = (*schema.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN note TEXT",))
    monkeypatch.setattr(schema, "MIGRATIONS", added)
    assert store.run(run).steps == 200
    with schema.connected(store.path) as file:
        assert file.execute("PRAGMA user_version").fetchone()[0] == len(added)
        assert file.execute("SELECT note FROM runs").fetchone()[0] is None


def test_another_program_s_database_is_refused(store: Store) -> None:
    store.folder.mkdir()
    with closing(sqlite3.connect(store.path)) as file:
        file.execute("CREATE TABLE runs (x)")
    with pytest.raises(StoreError, match="table runs already exists"):
        store.runs()


def test_the_store_works_on_both_sides_of_a_fork(store: Store) -> None:
    run = _start(_FORKER, str(store.folder)).communicate(timeout=60)[0].strip()
    assert [event.message for event in store.events(run)] == ["child", "parent"]


def test_no_file_stays_open(store: Store) -> None:
    store.create("digits", {}, {})
    held = [entry.resolve().name for entry in Path("/proc/self/fd").iterdir()]
    assert schema.FILE not in held
