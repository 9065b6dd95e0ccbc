"""The store's file: how it is opened, what is in it, how an older one is brought up to date."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from echelon.core.errors import RunError

FILE = "echelon.db"
BUSY_SECONDS = 5.0

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
"""Entry k takes a file from version k to k + 1; entries are only ever added."""


class StoreError(RunError):
    """The store's file is corrupt, locked for too long, or newer than this Echelon."""


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection for one piece of work; any fault of the file names the file.

    Opened anew each time (about a millisecond), so that a `Store` can be shared by threads and
    survives a fork, and no file stays open behind anybody's back.
    """
    try:
        with closing(_open(path)) as connection:
            _upgrade(connection, path)
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the run store cannot be used: {error}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; takes the write lock at once, so that a read inside stays true."""
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
    # Beside a WAL this loses nothing when a process dies, and no commit waits for the disk.
    connection.execute("PRAGMA synchronous = NORMAL")
    if _version(connection) == len(MIGRATIONS):
        return
    _use_wal(connection)
    with transaction(connection):
        found = _version(connection)  # again: another process may have been faster
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
    """Switch to a write-ahead log; where the file system has none, the old journal stays."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite does not wait for a lock here: two processes making a store at once meet.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
