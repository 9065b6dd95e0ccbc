"""Runs as text: tables for the command line, comparisons, and a one-sentence verdict.

`echelon runs` prints these; the HTML report reuses `verdict` and `node_rows`. In a terminal the
tables have colors; in a pipe they are plain and unwrapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.core.format import duration, figure, plain, sparkline, when
from echelon.track.progress import described
from echelon.track.records import Best, Event, Run, Series, is_number, smaller_is_better

# Tables for the command line


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


_WIDE = 10_000
"""Width where there is no terminal, so that lines in a pipe or file are not wrapped."""


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
    """Print everything about one run, from the verdict to its files."""
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


_UNDRAWN = frozenset({"epoch", "samples", "seconds"})


def _nodes(run: Run) -> Iterable[tuple[str, Table]]:
    """Yield tables about trainers and servers, if the run had servers."""
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


def comparison(runs: Sequence[Run]) -> Table:
    """Show runs side by side: status, metrics, and the settings that differ."""
    table = _table("", *(run.id for run in runs))
    table.add_row(Text("status"), *(Text(run.status, _STATUS[run.status]) for run in runs))
    table.add_row(*_texts("steps", *(f"{run.steps:,}" for run in runs)))
    table.add_row(*_texts("time", *(duration(run.seconds) for run in runs)))
    for name, values in metric_rows(runs).items():
        table.add_row(Text(name), *_marked(name, values))
    for key, values in config_differences(runs).items():
        table.add_row(*_texts(key, *map(_value, values)))
    return table


def _marked(name: str, values: Sequence[float | None]) -> list[Text]:
    """Mark the best value with a star, and with color in a terminal."""
    known = [value for value in values if value is not None]
    best = (min if smaller_is_better(name) else max)(known)
    stands_out = len(set(known)) > 1
    return [
        Text(f"{_value(value)} *", "bold green")
        if stands_out and value == best
        else Text(_value(value))
        for value in values
    ]


_STATUS = {"done": "green", "running": "cyan", "stopped": "yellow", "failed": "red", "lost": "red"}


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
    """Wrap values as plain text, so that square brackets are not taken for markup."""
    return [Text(value, _STATUS.get(value, "")) for value in values]


# What each trainer and each server did


class NodeRows(NamedTuple):
    heads: tuple[str, ...]
    rows: list[list[str]]


def node_rows(found: Mapping[str, Any]) -> list[NodeRows]:
    """Return one table for trainers and one for servers from a run summary's `nodes`."""
    trainers, servers = found.get("trainers", {}), found.get("servers", {})
    judged = any("merit" in figures for figures in trainers.values())
    heads = (*_TRAINERS, *(_JUDGED if judged else ()))
    rows = [_trainer(name, figures, judged=judged) for name, figures in trainers.items()]
    return [
        NodeRows(heads, rows),
        NodeRows(_SERVERS, [_server(name, figures) for name, figures in servers.items()]),
    ]


_TRAINERS = (
    *("trainer", "updates", "mean staleness", "updates by staleness", "pushed", "pulled"),
    *("waited", "refused", "sent twice"),
)


_JUDGED = ("merit", "rejected")


_SERVERS = ("server", "updates", "applying")


_STALENESS = "staleness_"


def _trainer(name: str, figures: Mapping[str, float], *, judged: bool) -> list[str]:
    ages = {
        int(key.removeprefix(_STALENESS)): int(count)
        for key, count in figures.items()
        if key.startswith(_STALENESS)
    }
    count = sum(ages.values())
    mean = sum(age * n for age, n in ages.items()) / count if count else 0.0
    row = [
        name,
        f"{figures.get('applied', 0):,.0f}",
        f"{mean:.2f}",
        ", ".join(f"{age}: {n:,}" for age, n in sorted(ages.items())) or "–",
        _bytes(figures.get("bytes_pushed", 0.0)),
        _bytes(figures.get("bytes_pulled", 0.0)),
        f"{figures.get('wait_seconds', 0.0):.1f} s",
        f"{figures.get('refused', 0):,.0f}",
        f"{figures.get('duplicates', 0):,.0f}",
    ]
    merit = f"{figures['merit']:.2f}" if "merit" in figures else "–"
    return [*row, merit, f"{figures.get('rejected', 0):,.0f}"] if judged else row


def _server(name: str, figures: Mapping[str, float]) -> list[str]:
    return [name, f"{figures.get('rounds', 0):,.0f}", f"{figures.get('apply_seconds', 0.0):.2f} s"]


def _bytes(count: float) -> str:
    """Format bytes sent over connections; 0 means shared memory on one host."""
    if not count:
        return _SHARED
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


_SHARED = "in memory"


# Plain data for --json and comparisons


Rows = dict[str, list[Any]]
"""One row per name, one value per run; None where a run has no value."""


def as_data(run: Run) -> dict[str, Any]:
    """Return a run as plain data for `--json`, without config and facts."""
    return {
        "run": run.id,
        "status": run.status,
        "task": run.task,
        "strategy": run.strategy,
        "steps": run.steps,
        "samples": run.summary.get("samples"),
        "seconds": round(run.seconds, 3),
        "metrics": run.metrics,
        "best": run.best._asdict() if run.best is not None else None,
        "started": run.started,
        "finished": run.finished,
        "folder": str(run.folder),
    }


def config_differences(runs: Sequence[Run]) -> Rows:
    """Return the settings that differ between runs, by dotted key."""
    flat = [dict(_flattened(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = {key: [values.get(key) for values in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def metric_rows(runs: Sequence[Run]) -> Rows:
    """Return the final metrics of all runs side by side."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return {name: [run.metrics.get(name) for run in runs] for name in names}


def _flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


# One sentence


def verdict(run: Run) -> str:
    """`Trained 10 epochs in 12 s; best accuracy 0.9722 at step 405.`"""
    amount = _amount(run)
    time = f" in {duration(run.seconds)}" if run.seconds else ""
    words = f"{_OPENING.get(run.status, run.status.capitalize())} {amount}{time}"
    if run.status == "failed" and run.summary.get("error"):
        return f"{words}: {str(run.summary['error']).rstrip('.')}."
    if run.best is None:  # a running run has no result yet
        return f"{words}; it was never evaluated." if run.status == "done" else f"{words}."
    return f"{words}; {_best_result(run.best, run.headline or run.best)}."


_OPENING = {
    "done": "Trained",
    "stopped": "Stopped after",
    "failed": "Failed after",
    "lost": "Lost its process after",
    "running": "Still running, after",
}


def _best_result(best: Best, headline: Best) -> str:
    at = f" at step {best.step:,}" if best.step is not None else ""
    words = f"best {_spoken(best)}{at}"
    return words if headline == best else f"held-out {_spoken(headline)}, {words}"


def _spoken(best: Best) -> str:
    return f"{metric_label(best.metric)} {figure(best.value)}"


def _amount(run: Run) -> str:
    epochs, total = run.facts.get("epochs"), run.facts.get("total_steps")
    if run.status == "done" and epochs and total and run.steps >= total:
        return f"{epochs} epoch" + ("s" if epochs != 1 else "")
    return f"{run.steps:,} step" + ("s" if run.steps != 1 else "")


def metric_label(metric: str) -> str:
    return metric.replace("_", " ")
