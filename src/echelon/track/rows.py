"""Between the rows of the store and the records it gives back."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.track.environment import environment
from echelon.track.process import Process, this_process
from echelon.track.records import Run

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
