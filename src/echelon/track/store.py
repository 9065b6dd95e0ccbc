"""SQLite run store, records."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echelon.core.errors import RunError, nearest
from echelon.core.format import warn
from echelon.track.environment import environment

# --- store ---
# One SQLite file that knows every run of a folder.

_LATEST_FIRST = "SELECT * FROM runs ORDER BY opened DESC, rowid DESC"
_OTHER_HOST_SECONDS = 60.0
"""A run on another machine that gave no sign of life for so long may be resumed here."""


class Store:
    """The runs of a folder: safe for many processes and threads at once.

    Reading never makes a folder or a file; `create` makes both.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE

    def create(self, name: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        """Begin a run: its id, unique and readable, is also the name of its new folder.

        A store that is corrupt or locked costs the record, not the run: it is told, and the id
        is then taken from the folders that are there.
        """
        name = slug(name)
        row = new_row(name, config, facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with connected(self.path) as store, transaction(store):
                found = store.execute("SELECT MAX(number) FROM runs WHERE name = ?", (name,))
                run, number = new_folder(self.folder, name, above=found.fetchone()[0] or 0)
                insert(store, row, run, number)
            return run
        except StoreError as error:
            warn(f"{error}; this run is not recorded")
            return new_folder(self.folder, name, above=0)[0]
        except OSError as error:
            raise RunError(f"{self.folder}: no run can be kept here: {error}") from None

    def describe(self, run: str, facts: Mapping[str, Any]) -> None:
        """Add to what is known about a run."""
        with connected(self.path) as store, transaction(store):
            row = store.execute("SELECT facts FROM runs WHERE id = ?", (run,)).fetchone()
            self._must_have(run, row is not None)
            merged = {**json.loads(row["facts"]), **facts}
            store.execute("UPDATE runs SET facts = ? WHERE id = ?", (dumped(merged), run))

    def reconfigure(self, run: str, config: Mapping[str, Any]) -> None:
        """A run that goes on may go on differently."""
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
        """Take up a run that ended or died; points after `step` are dropped, to come anew.

        `claimed`: whoever started this process has taken it up before, and stays its owner.
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
        """Keep figures and events in one transaction; a point given again replaces the old one."""
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
        """Every run, the latest first."""
        return [as_run(row, self.folder) for row in self._read(_LATEST_FIRST)]

    def run(self, text: str) -> Run:
        """The run with this id, this beginning of an id, or path; or the `last` one."""
        wanted = self._named(text)
        if wanted == "last":
            rows = self._read(f"{_LATEST_FIRST} LIMIT 1")
        else:
            rows = self._read("SELECT * FROM runs WHERE id = ?", wanted)
        return as_run(rows[0] if rows else self._one_like(wanted), self.folder)

    def names(self, run: str) -> list[str]:
        """The series of a run."""
        rows = self._read("SELECT DISTINCT name FROM points WHERE run = ? ORDER BY name", run)
        return [row["name"] for row in rows]

    def series(self, run: str, name: str) -> Series:
        """A figure over the steps; empty if it was never recorded."""
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
        """The run's id alone. The same id in another folder is another run."""
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


# --- schema ---
# The store's file: how it is opened, what is in it, how an older one is brought up to date.

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


# --- rows ---
# Between the rows of the store and the records it gives back.

_INSERT = """
INSERT INTO runs (id, name, number, status, task, strategy, started, opened, seen, step,
                  host, pid, born, config, facts, summary)
VALUES (:id, :name, :number, 'running', :task, :strategy, :now, :now, :now, 0,
        :host, :pid, :born, :config, :facts, '{}')
"""


def new_row(name: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run that begins now, all but its id and number."""
    # The machine is described now: a report may be written elsewhere, and later.
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


# --- naming ---
# Names and folders of runs.


def slug(name: str) -> str:
    """A name that is safe as a folder, on any system and in any shell."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:64]
    return plain or "run"


def new_folder(folder: Path, name: str, *, above: int) -> tuple[str, int]:
    """Make the folder of the next run of this name: (id, number).

    Making it is what claims the number, so it is unique even without a store, and a folder that
    outlived its store is never taken again.
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


# --- process ---
# Who runs a run, and whether that process is still there.

_STATE, _START = 0, 19  # fields of /proc/<pid>/stat, counted after the name


class Process(NamedTuple):
    """A process, told apart from a later one that got the same number."""

    host: str
    pid: int
    born: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """True only if we can know: a process of another machine is never said to be gone."""
        if not self.is_here:
            return False
        return not _exists(self.pid) or born(self.pid) != self.born


def this_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), pid, born(pid))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def born(pid: int) -> str:
    """Boot and start time of a process; empty if it is dead, or if the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[_STATE] in "ZX" else f"{boot}/{fields[_START]}"


# --- records ---
# What the store gives back.

Status = Literal["running", "done", "failed", "stopped"]
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse")


class Point(NamedTuple):
    """One recorded figure."""

    step: int
    name: str
    value: float
    time: float


class Event(NamedTuple):
    """Something a person should know."""

    step: int
    time: float
    message: str


class Series(NamedTuple):
    """A figure over the steps, in their order."""

    steps: list[int]
    values: list[float]
    times: list[float]


class Best(NamedTuple):
    """The best held-out result of a run; the step is not always known."""

    metric: str
    value: float
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the store knows it."""

    id: str
    name: str
    status: str
    """running, done, failed, stopped; or lost: it says running, but its process is gone."""
    task: str
    strategy: str
    started: float
    opened: float
    seen: float
    finished: float | None
    step: int
    process: Process
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    summary: Mapping[str, Any]
    folder: Path

    @property
    def steps(self) -> int:
        return int(self.summary.get("steps", self.step))

    @property
    def seconds(self) -> float:
        """How long it trained; for a run that goes on, how long it has."""
        if "seconds" in self.summary:
            return float(self.summary["seconds"])
        end = time.time() if self.status == "running" else (self.finished or self.seen)
        return max(0.0, end - self.opened)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures the run ended with."""
        found = self.summary.get("metrics") or {}
        return {name: float(value) for name, value in found.items() if is_number(value)}

    @property
    def headline(self) -> Best | None:
        """The figure to name first: a metric rather than a loss."""
        best, metrics = self.best, self.metrics
        name = _metric_first(metrics)
        if best is None or name is None or "loss" not in best.metric or "loss" in name:
            return best
        return Best(name, metrics[name])

    @property
    def best(self) -> Best | None:
        """What the run itself calls its best; else what it ended with."""
        found = self.summary.get("best")
        if isinstance(found, Mapping) and is_number(found.get("value")):
            return Best(str(found.get("metric", "loss")), found["value"], found.get("step"))
        metrics = self.metrics
        name = _metric_first(metrics)
        return Best(name, metrics[name]) if name is not None else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metric_first(names: Mapping[str, float]) -> str | None:
    return next((name for name in names if "loss" not in name), next(iter(names), None))


def smaller_is_better(metric: str) -> bool:
    return any(word in metric.lower() for word in SMALLER_IS_BETTER)
