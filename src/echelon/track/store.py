"""The run store: one SQLite file (echelon.db) that records every run of a folder.

Any number of processes and threads may use it at once. A connection is opened for each piece of
work and closed after it. Tables: `runs` (one row per run), `points` (values by run, name and step),
`events` (notices). MIGRATIONS upgrade an older file when it is opened.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from echelon.core.errors import RunError, nearest
from echelon.core.format import warn
from echelon.track.environment import environment
from echelon.track.records import Event, Point, Process, Run, Series, Status, this_process

FILE = "echelon.db"


BUSY_SECONDS = 5.0


_LATEST_FIRST = "SELECT * FROM runs ORDER BY opened DESC, rowid DESC"


_OTHER_HOST_SECONDS = 60.0
"""A run on another machine without a sign of life for this long may be resumed here."""


class StoreError(RunError):
    """The store's file is corrupt, locked for too long, or newer than this Echelon."""


class Store:
    """The runs of a folder: safe for many processes and threads at once.

    Reading creates neither the folder nor the file; `create` creates both.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE

    def create(self, name: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        """Record a new run and return its id, which is also the name of its new folder.

        If the store is corrupt or locked, warn and go on without a record: the run gets the next
        free id among the existing folders.
        """
        name = slug(name)
        row = new_row(name, config, facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with connected(self.path) as store, transaction(store):
                    found = store.execute("SELECT MAX(number) FROM runs WHERE name = ?", (name,))
                    run, number = new_folder(self.folder, name, above=found.fetchone()[0] or 0)
                    insert(store, row, run, number)
                return run
            except StoreError as error:
                run, _ = new_folder(self.folder, name, above=0)
                warn(f"{error}; this run is not recorded")
                return run
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot write runs here: {error.strerror}; choose another folder "
                "with track.folder=FOLDER"
            ) from None

    def describe(self, run: str, facts: Mapping[str, Any]) -> None:
        """Merge facts into those recorded for a run."""
        with connected(self.path) as store, transaction(store):
            row = store.execute("SELECT facts FROM runs WHERE id = ?", (run,)).fetchone()
            self._must_have(run, row is not None)
            merged = {**json.loads(row["facts"]), **facts}
            store.execute("UPDATE runs SET facts = ? WHERE id = ?", (dumped(merged), run))

    def reconfigure(self, run: str, config: Mapping[str, Any]) -> None:
        """Record the config with which a run is resumed."""
        with connected(self.path) as store, transaction(store):
            changed = store.execute(
                "UPDATE runs SET config = ?, strategy = COALESCE(?, strategy) WHERE id = ?",
                (dumped(config), config.get("strategy"), run),
            )
            self._must_have(run, changed.rowcount > 0)

    def finish(self, run: str, status: Status, summary: Mapping[str, Any]) -> None:
        now = time.time()
        with connected(self.path) as store, transaction(store):
            changed = store.execute(
                "UPDATE runs SET status = ?, summary = ?, finished = ?, seen = ? WHERE id = ?",
                (status, dumped(summary), now, now, run),
            )
            self._must_have(run, changed.rowcount > 0)

    def resume(self, run: str, step: int | None = None, *, claimed: bool = False) -> Run:
        """Mark a run as running again and drop its points after `step`.

        `claimed`: the parent process has already resumed the run and stays its owner.
        """
        found = self.run(run)
        now = time.time()
        with connected(self.path) as store, transaction(store):
            row = store.execute("SELECT * FROM runs WHERE id = ?", (found.id,)).fetchone()
            me = owner(row) if claimed else this_process()
            _refuse_if_busy(row, me, now)
            store.execute(
                "UPDATE runs SET status = 'running', finished = NULL, opened = ?, seen = ?, "
                "step = MIN(step, ?), summary = '{}', host = ?, pid = ?, born = ? WHERE id = ?",
                (now, now, row["step"] if step is None else step, *me, found.id),
            )
            if step is not None:
                store.execute("DELETE FROM points WHERE run = ? AND step > ?", (found.id, step))
        return self.run(found.id)

    def add_points(self, run: str, points: Iterable[Point]) -> None:
        self.record(run, list(points), ())

    def add_event(self, run: str, step: int, message: str) -> None:
        self.record(run, (), [Event(step, time.time(), message)])

    def record(self, run: str, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Store points and events in one transaction; a point replaces an older one of its step."""
        steps = [point.step for point in points] + [event.step for event in events]
        with connected(self.path) as store, transaction(store):
            changed = store.execute(
                "UPDATE runs SET seen = ?, step = MAX(step, ?) WHERE id = ?",
                (time.time(), max(steps, default=0), run),
            )
            self._must_have(run, changed.rowcount > 0)
            store.executemany(
                "INSERT OR REPLACE INTO points (run, step, name, value, time) "
                "VALUES (?, ?, ?, ?, ?)",
                ((run, *point) for point in points),
            )
            store.executemany(
                "INSERT INTO events (run, step, time, message) VALUES (?, ?, ?, ?)",
                ((run, *event) for event in events),
            )

    def runs(self) -> list[Run]:
        """Return all runs, the latest first."""
        return [as_run(row, self.folder) for row in self._read(_LATEST_FIRST)]

    def run(self, text: str) -> Run:
        """Find a run by id, by a unique prefix of its id, by its path, or as `last`."""
        wanted = self._named(text)
        if wanted == "last":
            rows = self._read(f"{_LATEST_FIRST} LIMIT 1")
        else:
            rows = self._read("SELECT * FROM runs WHERE id = ?", wanted)
        return as_run(rows[0] if rows else self._one_like(wanted), self.folder)

    def names(self, run: str) -> list[str]:
        """Return the names of all recorded series of a run."""
        rows = self._read("SELECT DISTINCT name FROM points WHERE run = ? ORDER BY name", run)
        return [row["name"] for row in rows]

    def series(self, run: str, name: str) -> Series:
        """Return the values of one name over the steps; empty if none were recorded."""
        rows = self._read(
            "SELECT step, value, time FROM points WHERE run = ? AND name = ? ORDER BY step",
            run,
            name,
        )
        values = [math.nan if row["value"] is None else row["value"] for row in rows]
        return Series([row["step"] for row in rows], values, [row["time"] for row in rows])

    def events(self, run: str) -> list[Event]:
        rows = self._read("SELECT step, time, message FROM events WHERE run = ? ORDER BY id", run)
        return [Event(*row) for row in rows]

    def _read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        if not self.path.exists():
            return []
        with connected(self.path) as store:
            return store.execute(query, values).fetchall()

    def _named(self, text: str) -> str:
        """Reduce a path or id to the id; refuse a path into another folder."""
        path, here = Path(text), self.folder
        if path.parent != Path() and path.parent.resolve() != here.resolve():
            raise RunError(
                f"run {text!r} is not in {here}: say --folder {path.parent}, or "
                f"track.folder={path.parent} to train"
            )
        return path.name

    def _one_like(self, wanted: str) -> sqlite3.Row:
        rows = self._read(_LATEST_FIRST)
        if not rows:
            raise RunError(f"run {wanted!r} is unknown: there are no runs in {self.folder}")
        like = [row for row in rows if row["id"].startswith(wanted)]
        if len(like) == 1:
            return like[0]
        ids = [row["id"] for row in like or rows]
        if like:
            raise RunError(f"run {wanted!r} could be any of {len(ids)}: {_some(ids)}")
        near = nearest(wanted, ids)
        hint = f"; did you mean {near!r}?" if near else ""
        raise RunError(f"run {wanted!r} is unknown{hint} (runs in {self.folder}: {_some(ids)})")

    def _must_have(self, run: str, found: bool) -> None:
        if not found:
            raise RunError(f"run {run!r} is not in {self.path}")


def _refuse_if_busy(row: sqlite3.Row, me: Process, now: float) -> None:
    busy = owner(row)
    if row["status"] != "running" or busy == me or busy.is_gone:
        return
    if busy.is_here or now - row["seen"] < _OTHER_HOST_SECONDS:
        raise RunError(
            f"run {row['id']!r} is still running (process {busy.pid} on {busy.host}): "
            f"stop it before resuming it"
        )


def _some(ids: Sequence[str]) -> str:
    more = f", … {len(ids) - 8} more" if len(ids) > 8 else ""
    return ", ".join(ids[:8]) + more


# Rows of the table `runs`


_INSERT = """
INSERT INTO runs (id, name, number, status, task, strategy, started, opened, seen, step,
                  host, pid, born, config, facts, summary)
VALUES (:id, :name, :number, 'running', :task, :strategy, :now, :now, :now, 0,
        :host, :pid, :born, :config, :facts, '{}')
"""


def new_row(name: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a new run except id and number."""
    # Describe this machine now: the report may be written later and on another one.
    facts = {"environment": environment(), **facts}
    return {
        "name": name,
        "task": str(facts.get("task", name)),
        "strategy": str(facts.get("strategy", "single")),
        "now": time.time(),
        "config": dumped(config),
        "facts": dumped(facts),
        **this_process()._asdict(),
    }


def insert(store: sqlite3.Connection, row: Mapping[str, Any], run: str, number: int) -> None:
    store.execute(_INSERT, {**row, "id": run, "number": number})


def owner(row: sqlite3.Row) -> Process:
    return Process(row["host"], row["pid"], row["born"])


def as_run(row: sqlite3.Row, folder: Path) -> Run:
    process = owner(row)
    lost = row["status"] == "running" and process.is_gone
    return Run(
        **{key: row[key] for key in ("id", "name", "task", "strategy", "step")},
        **{key: row[key] for key in ("started", "opened", "seen", "finished")},
        **{key: json.loads(row[key]) for key in ("config", "facts", "summary")},
        status="lost" if lost else row["status"],
        process=process,
        folder=folder / row["id"],
    )


def dumped(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), default=str)


# Names and folders of runs


def slug(name: str) -> str:
    """Return `name` reduced to characters that are safe in folder names and shells."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:64]
    return plain or "run"


def new_folder(folder: Path, name: str, *, above: int) -> tuple[str, int]:
    """Create the folder of the next run of this name; return (id, number).

    Creating the folder claims the number: numbers are unique even without a store, and a folder
    whose store was deleted is not reused.
    """
    number = max(above, *_taken(folder, name)) + 1
    while True:
        run = f"{name}-{number:04d}"
        try:
            (folder / run).mkdir(parents=True)
            return run, number
        except FileExistsError:
            number += 1


def _taken(folder: Path, name: str) -> list[int]:
    ends = (entry.name.removeprefix(f"{name}-") for entry in folder.glob(f"{name}-*"))
    return [0, *(int(end) for end in ends if end.isdecimal())]


# The file: schema, connections, upgrades


MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE runs (
            id       TEXT PRIMARY KEY,
            name     TEXT NOT NULL,
            number   INTEGER NOT NULL,
            status   TEXT NOT NULL CHECK (status IN ('running', 'done', 'failed', 'stopped')),
            task     TEXT NOT NULL,
            strategy TEXT NOT NULL,
            started  REAL NOT NULL,      -- the first time
            opened   REAL NOT NULL,      -- the last time: started or resumed
            seen     REAL NOT NULL,      -- the last sign of life
            step     INTEGER NOT NULL,   -- how far it had come by then
            finished REAL,
            host     TEXT NOT NULL,
            pid      INTEGER NOT NULL,
            born     TEXT NOT NULL,      -- tells this process from a later one of the same pid
            config   TEXT NOT NULL,
            facts    TEXT NOT NULL,
            summary  TEXT NOT NULL,
            UNIQUE (name, number)
        )
        """,
        """
        CREATE TABLE points (
            run   TEXT NOT NULL,
            name  TEXT NOT NULL,
            step  INTEGER NOT NULL,
            value REAL,                  -- NULL is NaN: SQLite has no NaN of its own
            time  REAL NOT NULL,
            PRIMARY KEY (run, name, step)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE events (
            id      INTEGER PRIMARY KEY,
            run     TEXT NOT NULL,
            step    INTEGER NOT NULL,
            time    REAL NOT NULL,
            message TEXT NOT NULL
        )
        """,
        "CREATE INDEX events_of_run ON events (run, id)",
    ),
)
"""Entry k upgrades a file from version k to k + 1. Append entries; never change one."""


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for one piece of work; errors name the file.

    Opening takes about a millisecond. In return a `Store` can be shared by threads, survives a
    fork, and keeps no file open.
    """
    try:
        with closing(_open(path)) as connection:
            _upgrade(connection, path)
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the run store cannot be used: {error}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the block or roll it back. Lock for writing at once, so that reads stay valid."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    # With a write-ahead log NORMAL loses nothing when a process dies, and commits need no fsync.
    connection.execute("PRAGMA synchronous = NORMAL")
    if _version(connection) == len(MIGRATIONS):
        return
    _use_wal(connection)
    with transaction(connection):
        found = _version(connection)  # read again: another process may have upgraded meanwhile
        if found > len(MIGRATIONS):
            raise StoreError(
                f"{path}: written by a newer Echelon (version {found} of the store, "
                f"this one knows {len(MIGRATIONS)}): update Echelon"
            )
        for statements in MIGRATIONS[found:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log; keep the rollback journal where it is not supported."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite ignores the timeout here: retry, as another process may create the store.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
