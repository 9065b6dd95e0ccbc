"""Runs on the command line: aligned with or without a terminal, coloured only in one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.core.figures import figure
from echelon.track.compare import config_differences, metric_rows
from echelon.track.nodes import node_rows
from echelon.track.progress import described
from echelon.track.records import Event, Run, Series, is_number, smaller_is_better
from echelon.track.report.verdict import verdict
from echelon.track.text import duration, plain, sparkline, when

_STATUS = {"done": "green", "running": "cyan", "stopped": "yellow", "failed": "red", "lost": "red"}
_UNDRAWN = frozenset({"epoch", "samples", "seconds"})
_WIDE = 10_000
"""Columns where there is no terminal: a pipe or a file has no edge to wrap at."""


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def run_table(runs: Iterable[Run]) -> Table:
    table = _table("RUN", "STATUS", "TASK", "STRATEGY", "STEPS", "RESULT", "TIME", "STARTED")
    table.columns[4].justify = "right"
    for run in runs:
        table.add_row(
            *_texts(run.id, run.status, run.task, run.strategy, f"{run.steps:,}"),
            *_texts(_result(run), duration(run.seconds), when(run.started)),
        )
    return table


def show(out: Console, run: Run, series: Mapping[str, Series], events: Sequence[Event]) -> None:
    """Everything about one run, from the verdict to its files."""
    out.print(Text.assemble((run.id, "bold"), "  ", (run.status, _STATUS[run.status])))
    out.print(Text(verdict(run)))
    out.print(Text(" · ".join(described(run.facts)), "dim"))
    for title, body in (
        ("curves", _curves(series)),
        ("metrics", _pairs(run.metrics)),
        *_nodes(run),
        ("data", _pairs(run.facts.get("about") or {})),
        ("events", _events(events)),
        ("config", Text(_yaml(run.config))),
        ("files", _pairs({"folder": str(run.folder), **_files(run)})),
    ):
        if body is not None:
            out.print(Text(f"\n{title}", "bold"))
            out.print(body)


def comparison(runs: Sequence[Run]) -> Table:
    """Runs side by side: how they went, what they reached, and where their configs differ."""
    table = _table("", *(run.id for run in runs))
    table.add_row(Text("status"), *(Text(run.status, _STATUS[run.status]) for run in runs))
    table.add_row(*_texts("steps", *(f"{run.steps:,}" for run in runs)))
    table.add_row(*_texts("time", *(duration(run.seconds) for run in runs)))
    for name, values in metric_rows(runs).items():
        table.add_row(Text(name), *_marked(name, values))
    for key, values in config_differences(runs).items():
        table.add_row(*_texts(key, *map(_value, values)))
    return table


def _curves(series: Mapping[str, Series]) -> Table | None:
    shown = {name: s for name, s in series.items() if name.partition("/")[2] not in _UNDRAWN}
    if not shown:
        return None
    table = _table("series", "first", "", "last", "lowest", "highest")
    for name, found in shown.items():
        values = found.values
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        ends = (figure(values[0]), sparkline(values), figure(values[-1]))
        table.add_row(*_texts(name, *ends, figure(min(finite)), figure(max(finite))))
    return table


def _nodes(run: Run) -> Iterable[tuple[str, Table]]:
    """Where there are servers: theirs and the trainers' figures."""
    found = run.summary.get("nodes")
    for title, rows in zip(
        ("trainers", "servers"), node_rows(found) if found else (), strict=False
    ):
        table = _table(*rows.heads)
        for row in rows.rows:
            table.add_row(*_texts(*row))
        yield title, table


def _events(events: Sequence[Event]) -> Table | None:
    if not events:
        return None
    table = Table.grid(padding=(0, 2))
    for event in events:
        table.add_row(*_texts(f"step {event.step:,}", event.message))
    return table


def _pairs(values: Mapping[str, Any]) -> Table | None:
    if not values:
        return None
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(*_texts(name, _value(value)))
    return table


def _files(run: Run) -> dict[str, str]:
    report = run.folder / "report.html"
    return {"report": str(report)} if report.exists() else {}


def _marked(name: str, values: Sequence[float | None]) -> list[Text]:
    """The best value stands out; a star says so where there is no colour."""
    known = [value for value in values if value is not None]
    best = (min if smaller_is_better(name) else max)(known)
    stands_out = len(set(known)) > 1
    return [
        Text(f"{_value(value)} *", "bold green")
        if stands_out and value == best
        else Text(_value(value))
        for value in values
    ]


def _result(run: Run) -> str:
    found = run.headline
    return f"{found.metric} {figure(found.value)}" if found is not None else "–"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return figure(value) if is_number(value) else str(value)


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True).rstrip()


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    return table


def _texts(*values: str) -> list[Text]:
    """As they are: square brackets in a message are no markup."""
    return [Text(value, _STATUS.get(value, "")) for value in values]
