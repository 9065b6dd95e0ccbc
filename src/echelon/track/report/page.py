"""The report: one file that needs nothing else, neither scripts from elsewhere nor a network."""

from __future__ import annotations

from pathlib import Path

from echelon.core.html import Html, el, join
from echelon.core.page import document, section
from echelon.core.scale import Scale, step_scale
from echelon.track.report import sections
from echelon.track.report.chart import draw, hover_data
from echelon.track.report.confusion import confusion
from echelon.track.report.curves import Chart, charts
from echelon.track.report.gather import Contents
from echelon.track.report.nodes import nodes
from echelon.track.report.verdict import tiles, verdict
from echelon.track.text import to_json, when

_HERE = Path(__file__).parent


def page(contents: Contents) -> str:
    """The whole document."""
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
        parts.append(section("Samples", sections.samples(found.samples, found.labels)))
    return join(parts)


def _nodes(contents: Contents) -> Html | None:
    found = contents.run.summary.get("nodes")
    if not found:
        return None
    return section("Trainers and servers", *nodes(found))


def _events(contents: Contents) -> Html | None:
    if not contents.events:
        return None
    listed = sections.events(contents.events, contents.run.started)
    return section("Events", listed, note=f"{len(contents.events):,}")


def _details(contents: Contents) -> Html:
    run = contents.run
    copy = el("button", "Copy", type="button", id="copy", hidden=True)
    left = section("Config", copy, sections.config(run.config), kind="config")
    right = el(
        "div",
        *(section(title, facts) for title, facts in sections.facts(run)),
    )
    return el("div", left, right, class_="details")


def _data(contents: Contents, drawn: list[Chart], x: Scale) -> Html:
    """Figures for the script. Not a script itself, and `<` cannot end it."""
    epochs = contents.series.get("train/epoch")
    found = {
        "charts": [hover_data(chart, x) for chart in drawn],
        "epochs": _changes(epochs.steps, epochs.values) if epochs is not None else [],
    }
    text = to_json(found).replace("<", "\\u003c")
    return el("script", Html(text), type="application/json", id="data")


def _changes(steps: list[int], epochs: list[float]) -> list[tuple[int, float]]:
    """The first recorded step of every epoch."""
    first: dict[float, int] = {}
    for step, epoch in zip(steps, epochs, strict=True):
        first.setdefault(epoch, step)
    return [(step, epoch) for epoch, step in first.items()]
