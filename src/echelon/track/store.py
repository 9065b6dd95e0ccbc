"""One SQLite file that knows every run of a folder."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.core.errors import RunError, nearest
from echelon.track.naming import new_folder, slug
from echelon.track.process import Process, this_process
from echelon.track.records import Event, Point, Run, Series, Status
from echelon.track.rows import as_run, dumped, insert, new_row, owner
from echelon.track.schema import FILE, StoreError, connected, transaction
from echelon.track.text import warn

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
