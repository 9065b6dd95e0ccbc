"""The report page: one HTML file that needs no network, no other file and no server.

`gather` reads a run from the store and its folder; `page` turns it into HTML: verdict and tiles,
charts (charts.py), confusion matrix and samples, trainers and servers, events, config, machine.
style.css and script.js lie beside this file and are embedded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from echelon.core.format import duration, figure, plain, short, size, to_json, when
from echelon.core.html import Html, Scale, document, el, join, section, step_scale, tile
from echelon.track.records import Event, Run, Series, is_number
from echelon.track.report.charts import Chart, charts, draw, hover_data
from echelon.track.store import Store
from echelon.track.views import NodeRows, metric_label, node_rows, verdict

EVALUATION = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The model's results on validation samples; any part may be missing."""

    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    """Rows: actual class; columns: predicted class."""
    samples: tuple[Mapping[str, str], ...] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything one report shows."""

    run: Run
    series: Mapping[str, Series]
    events: tuple[Event, ...]
    outcome: Outcome = field(default_factory=Outcome)


def gather(store: Store, run_id: str) -> Contents:
    run = store.run(run_id)
    series = {name: store.series(run.id, name) for name in store.names(run.id)}
    outcome = read_outcome(run.folder / EVALUATION)
    return Contents(run, series, tuple(store.events(run.id)), outcome)


def read_outcome(path: Path) -> Outcome:
    """Read evaluation.json; if it is invalid, the report shows why instead."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _gathered_outcome(found)
    except FileNotFoundError:
        return Outcome()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Outcome(fault=f"{path.name} cannot be shown: {error}")


def _gathered_outcome(found: Mapping[str, Any]) -> Outcome:
    rows = tuple(tuple(row) for row in found.get("confusion") or ())
    if any(len(row) != len(rows) or not all(map(is_number, row)) for row in rows):
        raise ValueError("confusion must be a square matrix of counts")
    labels = tuple(str(label) for label in found.get("labels") or ())
    samples = tuple(_sample_texts(sample) for sample in found.get("samples") or ())
    missing = tuple(str(i) for i in range(len(labels), len(rows)))  # classes without a name
    return Outcome((labels + missing)[: max(len(rows), len(labels))], rows, samples)


def _sample_texts(sample: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(sample.get(key) or "") for key in ("input", "output", "target")}


# The page, top to bottom


_HERE = Path(__file__).parent


def page(contents: Contents) -> str:
    """Return the complete document."""
    run = contents.run
    script = (_HERE / "script.js").read_text(encoding="utf-8")
    drawn = sorted(charts(contents.series), key=lambda chart: chart.minor)
    x = step_scale(max((max(series.steps) for series in contents.series.values()), default=1))
    body = el(
        "body",
        _header(contents),
        el(
            "main",
            _curves(drawn, x),
            _outcome(contents),
            _nodes(contents),
            _events(contents),
            _details(contents),
        ),
        el("footer", f"{run.id} · {run.folder} · written by Echelon"),
        _data(contents, drawn, x),
        el("script", Html(script)),
    )
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    return document(run.id, body, style=style, script=script)


def _header(contents: Contents) -> Html:
    run = contents.run
    line = el(
        "p",
        el("span", run.status, class_=f"status {run.status}"),
        el("code", run.id),
        el("time", when(run.started)),
        el("button", "◐", type="button", id="theme", title="Light or dark", hidden=True),
        class_="top",
    )
    return el(
        "header", line, el("h1", run.name), el("p", verdict(run), class_="verdict"), tiles(run)
    )


def tiles(run: Run) -> Html:
    """The figures to see first."""
    named = {f"held-out {metric_label(name)}": value for name, value in run.metrics.items()}
    if run.best is not None:
        named.pop(f"held-out {metric_label(run.best.metric)}", None)
        named[f"best {metric_label(run.best.metric)}"] = run.best.value
    order = sorted(named, key=lambda name: ("loss" in name, not name.startswith("best")))
    parts = [
        tile(name, figure(named[name]), "result" if name == order[0] else None)
        for name in order[:3]
    ]
    samples = run.summary.get("samples")
    if samples and run.seconds:
        parts.append(tile("samples/s", short(samples / run.seconds)))
    parts += [tile("steps", f"{run.steps:,}"), tile("time", duration(run.seconds))]
    return el("div", join(parts), class_="tiles")


def _curves(drawn: list[Chart], x: Scale) -> Html:
    if not drawn:
        empty = el("p", "No figures were recorded.", class_="quiet")
        return section("Curves", empty)
    major = [draw(chart, x) for chart in drawn if not chart.minor]
    minor = [draw(chart, x) for chart in drawn if chart.minor]
    rows = [el("div", join(row), class_="charts") for row in (major, minor) if row]
    return section("Curves", join(rows), note="by step")


def _outcome(contents: Contents) -> Html:
    found = contents.outcome
    parts: list[Html] = []
    if found.fault is not None:
        parts.append(section("Held-out samples", el("p", found.fault, class_="quiet")))
    if found.confusion:
        count = sum(map(sum, found.confusion))
        note = f"{count:,} held-out samples · rows: actual, columns: predicted"
        parts.append(section("Confusion", confusion(found), note=note))
    if found.samples:
        parts.append(section("Samples", samples(found.samples, found.labels)))
    return join(parts)


def _nodes(contents: Contents) -> Html | None:
    found = contents.run.summary.get("nodes")
    if not found:
        return None
    return section("Trainers and servers", *nodes(found))


def _events(contents: Contents) -> Html | None:
    if not contents.events:
        return None
    listed = events(contents.events, contents.run.started)
    return section("Events", listed, note=f"{len(contents.events):,}")


def _details(contents: Contents) -> Html:
    run = contents.run
    copy = el("button", "Copy", type="button", id="copy", hidden=True)
    left = section("Config", copy, config(run.config), kind="config")
    right = el(
        "div",
        *(section(title, facts) for title, facts in facts(run)),
    )
    return el("div", left, right, class_="details")


def _data(contents: Contents, drawn: list[Chart], x: Scale) -> Html:
    """Embed the data for script.js as JSON; `<` is escaped so that it cannot end the element."""
    epochs = contents.series.get("train/epoch")
    found = {
        "charts": [hover_data(chart, x) for chart in drawn],
        "epochs": _changes(epochs.steps, epochs.values) if epochs is not None else [],
    }
    text = to_json(found).replace("<", "\\u003c")
    return el("script", Html(text), type="application/json", id="data")


def _changes(steps: list[int], epochs: list[float]) -> list[tuple[int, float]]:
    """Return the first recorded step of every epoch."""
    first: dict[float, int] = {}
    for step, epoch in zip(steps, epochs, strict=True):
        first.setdefault(epoch, step)
    return [(step, epoch) for epoch, step in first.items()]


# Lists and facts


def facts(run: Run) -> Iterator[tuple[str, Html]]:
    """Yield titled lists of facts: about the run, and about the machine."""
    machine = run.facts.get("environment", {})
    for title, values, names in (
        ("Run", run.facts, _RUN_FACTS),
        ("Machine", machine, _MACHINE_FACTS),
    ):
        known = [key for key in names if values.get(key) not in (None, "")]
        rows = [el("div", el("dt", names[key]), el("dd", _fact(key, values[key]))) for key in known]
        if rows:
            yield title, el("dl", join(rows), class_="facts")


_RUN_FACTS = {
    "task": "Task",
    "model": "Model",
    "parameters": "Parameters",
    "samples": "Training samples",
    "held_out": "Held-out samples",
    "batch_size": "Batch size",
    "strategy": "Strategy",
    "workers": "Workers",
    "device": "Device",
    "precision": "Precision",
    "threads": "Threads",
}


_MACHINE_FACTS = {
    "cpu": "Processor",
    "cores": "Cores",
    "memory": "Memory",
    "disk_free": "Free disk",
    "os": "System",
    "host": "Host",
    "python": "Python",
    "torch": "PyTorch",
    "echelon": "Echelon",
}


_BYTES = ("memory", "disk_free")


def _fact(key: str, value: Any) -> str:
    if key in _BYTES:
        return size(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value < 10_000_000 else short(value)
    return figure(value) if isinstance(value, float) else str(value)


def config(values: Mapping[str, Any]) -> Html:
    """Show the resolved job as YAML with highlighted keys."""
    text = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True, width=90)
    return el("pre", el("code", join([_yaml_line(line) for line in text.splitlines()])))


_YAML_LINE = re.compile(r"^(\s*(?:- )*)([^\s:#][^:]*:)(.*)$")


def _yaml_line(line: str) -> Html:
    found = _YAML_LINE.match(line)
    if found is None:
        return join((line, Html("\n")))
    indent, key, rest = found.groups()
    return join((indent, el("b", key), rest, Html("\n")))


def events(found: Iterable[Event], started: float) -> Html:
    every = list(found)
    rows = [
        el(
            "li",
            el("b", f"step {event.step:,}"),
            el("span", event.message),
            el("small", f"+{duration(max(0.0, event.time - started))}"),
        )
        for event in every[:_EVENTS]
    ]
    more = len(every) - _EVENTS
    rest = el("p", f"and {more:,} more", class_="quiet") if more > 0 else None
    return join((el("ol", join(rows), class_="events"), rest))


_EVENTS = 200


def samples(found: Iterable[Mapping[str, str]], labels: Sequence[str]) -> Html:
    every = list(found)
    cards = [_sample(sample, sample["target"] in labels) for sample in every[:_SAMPLES]]
    long = any(len(text) > 160 for sample in every for text in sample.values())
    return el("div", join(cards), class_="samples long" if long else "samples")


_SAMPLES = 60


def _sample(sample: Mapping[str, str], is_class: bool) -> Html:
    """Mark a class as right or wrong; a number or a text is never exactly right."""
    right = sample["output"] == sample["target"]
    verdict = ("right" if right else "wrong") if is_class else None
    parts = [
        el("div", el("dt", key), el("dd", sample[key]), class_=key)
        for key in ("input", "output", "target")
        if sample[key]
    ]
    return el("dl", join(parts), class_=verdict)


def nodes(found: Mapping[str, Any]) -> list[Html]:
    """Return tables about trainers and servers from a run summary's `nodes`."""
    return [_table(rows) for rows in node_rows(found)]


def _table(found: NodeRows) -> Html:
    head = el("tr", *(el("th", text) for text in found.heads))
    body = [el("tr", *(el("td", text) for text in row)) for row in found.rows]
    return el("table", el("thead", head), el("tbody", join(body)), class_="nodes")


# Confusion between classes


LARGEST = 40
"""With more classes the matrix is unreadable: only the lists are shown."""


_LISTED = 12


def confusion(outcome: Outcome) -> Html:
    """Return the confusion matrix (or the hardest classes) and the most frequent mistakes."""
    size = len(outcome.confusion)
    parts = [_matrix(outcome)] if size <= LARGEST else [_hardest(outcome)]
    return el("div", join(parts), _mistakes(outcome), class_="confusion")


def recalls(outcome: Outcome) -> list[float]:
    """Return the recall of each class; NaN for a class without samples."""
    return [_share(row[i], sum(row)) for i, row in enumerate(outcome.confusion)]


def precisions(outcome: Outcome) -> list[float]:
    columns = list(zip(*outcome.confusion, strict=True))
    return [_share(column[i], sum(column)) for i, column in enumerate(columns)]


class Mistake(NamedTuple):
    actual: int
    taken_for: int
    times: int


def mistakes(outcome: Outcome) -> list[Mistake]:
    """Return all confused pairs of classes, the most frequent first."""
    pairs = [
        Mistake(i, j, count)
        for i, row in enumerate(outcome.confusion)
        for j, count in enumerate(row)
        if i != j and count > 0
    ]
    return sorted(pairs, key=lambda mistake: -mistake.times)


def _matrix(outcome: Outcome) -> Html:
    labels = outcome.labels
    size = len(outcome.confusion)
    tilted = max(map(len, labels), default=0) > 3
    heads = [el("th", el("span", name), scope="col", title=name) for name in labels[:size]]
    head = el(
        "tr",
        el("td"),
        join(heads),
        el("th", el("span", "recall"), scope="col", class_="side"),
    )
    shares = recalls(outcome)
    body = [_row(outcome, i, shares[i]) for i in range(size)]
    density = "wide" if size <= 12 else "middle" if size <= 20 else "dense"
    kind = f"matrix {density}" + (" tilted" if tilted else "")
    table = el("table", el("thead", head), el("tbody", join(body), _precision_row(outcome)))
    return el("div", table, class_=kind, tabindex=0)


def _row(outcome: Outcome, i: int, recall: float) -> Html:
    row = outcome.confusion[i]
    cells = [_cell(outcome, i, j, count, sum(row)) for j, count in enumerate(row)]
    label = el("th", el("span", outcome.labels[i]), scope="row", title=outcome.labels[i])
    return el("tr", label, join(cells), el("td", _bar(recall), class_="side"))


def _cell(outcome: Outcome, i: int, j: int, count: int, total: int) -> Html:
    if count == 0:
        return el("td", class_="none")
    share = count / total
    # The root lifts the few mistakes of a good model out of the background.
    heat = share if i == j else 0.1 + 0.9 * math.sqrt(share)
    kind = ("hit" if i == j else "miss") + (" strong" if heat > 0.55 else "")
    said = f"{outcome.labels[i]} → {outcome.labels[j]}: {count:,} of {total:,} ({share:.1%})"
    return el("td", short(count), class_=kind, style=f"--heat:{heat:.2f}", title=said)


def _precision_row(outcome: Outcome) -> Html:
    cells = [el("td", _percent(share)) for share in precisions(outcome)]
    total = sum(map(sum, outcome.confusion))
    hits = sum(row[i] for i, row in enumerate(outcome.confusion))
    overall = el("td", el("b", _percent(_share(hits, total))), class_="side")
    return el("tr", el("th", "precision", scope="row"), join(cells), overall, class_="foot")


def _mistakes(outcome: Outcome) -> Html:
    found = mistakes(outcome)
    if not found:
        return el("div", el("h3", "Mistakes"), el("p", "None.", class_="quiet"), class_="list")
    totals = [sum(row) for row in outcome.confusion]
    rows = [
        el(
            "li",
            el("span", outcome.labels[m.actual], el("i", " → "), outcome.labels[m.taken_for]),
            el("b", f"{m.times:,}"),
            el("small", f"of {totals[m.actual]:,}"),
        )
        for m in found[:_LISTED]
    ]
    title = el("h3", "Most frequent mistakes")
    return el("div", title, el("ol", join(rows)), class_="list")


def _hardest(outcome: Outcome) -> Html:
    shares = recalls(outcome)
    known = [i for i, share in enumerate(shares) if not math.isnan(share)]
    order = sorted(known, key=shares.__getitem__)[:_LISTED]
    rows = [
        el("li", el("span", outcome.labels[i]), _bar(shares[i]), class_="measured") for i in order
    ]
    title = el("h3", f"Hardest of {len(shares)} classes, by recall")
    return el("div", title, el("ol", join(rows)), class_="list")


def _bar(share: float) -> Html:
    if math.isnan(share):
        return el("span", "–")
    return el("span", el("i", style=f"--part:{share:.3f}"), _percent(share), class_="bar")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.0f}%"
