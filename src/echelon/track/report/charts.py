"""Charts of a report: which curves a run has, and each chart as inline SVG.

The outer SVG has no viewBox: positions are percentages and sizes are pixels, so that labels and
dots keep their size at any width. The curves lie in an inner SVG that is stretched over it.
Long curves are thinned to about a thousand points that draw the same line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.core.format import figure
from echelon.core.html import Html, Scale, el, join, value_scale
from echelon.track.records import Series, smaller_is_better

# Which curves belong into which chart


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; `name` is the split it was measured on: train or valid."""

    name: str
    series: Series
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one metric over the steps."""

    title: str
    lines: tuple[Line, ...]
    may_be_log: bool = False
    from_zero: bool = False
    top: float | None = None
    minor: bool = False


def charts(series: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of a run: loss, metrics, then rates and gradient norm."""
    figures = {name.partition("/")[2] for name in series} - _NOT_DRAWN
    metrics = sorted(figures - {"loss"} - set(_BESIDE))
    order = [name for name in ("loss", *metrics, *_BESIDE) if name in figures]
    return [_chart(name, series) for name in order]


def _chart(name: str, series: Mapping[str, Series]) -> Chart:
    lines = tuple(
        Line(part, _bounded(series[f"{part}/{name}"]), noisy=part == "train" and name in _NOISY)
        for part in ("train", "valid")
        if f"{part}/{name}" in series
    )
    minor = name in _BESIDE
    return Chart(
        title=_BESIDE.get(name, name.replace("_", " ").capitalize()),
        lines=lines,
        may_be_log=name == "grad_norm" or smaller_is_better(name),
        from_zero=name in ("lr", "samples_per_s"),
        top=None if minor or not _is_share(lines) else 1.0,
        minor=minor,
    )


_BESIDE = {
    "lr": "Learning rate",
    "samples_per_s": "Samples per second",
    "grad_norm": "Gradient norm",
}


_NOT_DRAWN = frozenset({"epoch", "samples", "seconds", "steps_per_s"})


_NOISY = frozenset({"loss", "grad_norm", "samples_per_s"})


def _bounded(series: Series) -> Series:
    """Treat values that are too large to draw as non-finite."""
    return series._replace(values=[v if abs(v) < _LARGEST else math.nan for v in series.values])


_LARGEST = 1e100


def _is_share(lines: tuple[Line, ...]) -> bool:
    """Whether all values lie in [0, 1], as accuracy, recall and AUC do."""
    values = [value for line in lines for value in line.series.values if math.isfinite(value)]
    return bool(values) and min(values) >= 0 and max(values) <= 1


# One chart as SVG


def draw(chart: Chart, x: Scale) -> Html:
    """Return a chart with title, legend and values to hover over."""
    y = _values(chart)
    body = el(
        "svg",
        _grid(x, y),
        _curves(chart, x, y),
        *(_marks(line, x, y, _best(chart, line)) for line in chart.lines),
        role="img",
        aria_label=_spoken(chart),
    )
    plot = el("div", body, el("div", class_="tip", hidden=True), class_="plot")
    kind = "chart minor" if chart.minor else "chart"
    return el("figure", _caption(chart, y.log), plot, class_=kind, tabindex=0)


def hover_data(chart: Chart, x: Scale) -> dict[str, Any]:
    """Return what script.js needs to show values under the pointer."""
    y = _values(chart)
    return {
        "x": [x.low, x.high],
        "y": [y.low, y.high, y.log],
        "lines": [_thinned(line) for line in chart.lines],
    }


def _values(chart: Chart) -> Scale:
    finite = [v for line in chart.lines for v in line.series.values if math.isfinite(v)]
    return value_scale(
        finite or [0.0], may_be_log=chart.may_be_log, from_zero=chart.from_zero, top=chart.top
    )


def _thinned(line: Line) -> dict[str, Any]:
    kept = downsample(line.series.values)
    return {
        "name": line.name,
        "x": [line.series.steps[i] for i in kept],
        "y": [float(f"{line.series.values[i]:.5g}") for i in kept],
    }


def _caption(chart: Chart, log: bool) -> Html:
    entries = [
        el(
            "li",
            el("i", class_=line.name),
            "last" if chart.minor else line.name,
            el("b", figure(line.series.values[-1])),
        )
        for line in chart.lines
    ]
    note = el("small", "log scale") if log else None
    return el("figcaption", el("h3", chart.title, note), el("ul", join(entries), class_="legend"))


def _grid(x: Scale, y: Scale) -> Html:
    parts: list[Html] = []
    for place, label in y.ticks():
        at = _percent(1 - place)
        parts.append(el("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(el("text", label, x=-8, y=at, dy="0.32em", class_="left"))
    for place, label in x.ticks():
        at = _percent(place)
        parts.append(el("text", label, x=at, y="100%", dy="1.6em", class_="below"))
    parts.append(el("line", x1="0", x2="100%", y1="100%", y2="100%", class_="axis"))
    return join(parts)


def _curves(chart: Chart, x: Scale, y: Scale) -> Html:
    paths: list[Html] = []
    for line in chart.lines:
        steps, values = line.series.steps, line.series.values
        smooth = line.noisy and len(values) >= _SMOOTH_FROM
        kind = f"{line.name} raw" if smooth else line.name
        paths.append(_path(steps, values, downsample(values), x, y, kind))
        if smooth:
            averages = smoothed(values, len(values) / 40)
            paths.append(_path(steps, averages, downsample(averages, 300), x, y, line.name))
    box = f"0 0 {_UNITS} {_UNITS}"
    return el(
        "svg",
        join(paths),
        viewbox=box,
        preserveaspectratio="none",
        width="100%",
        height="100%",
        class_="curves",
    )


_UNITS = 1000


_SMOOTH_FROM = 60


def _path(
    steps: Sequence[int],
    values: Sequence[float],
    kept: Sequence[int],
    x: Scale,
    y: Scale,
    kind: str,
) -> Html:
    """Draw a line through the kept points; a non-finite value interrupts it."""
    words: list[str] = []
    pen = "M"
    for i in kept:
        if not math.isfinite(values[i]):
            pen = "M"
            continue
        across, down = x.place(steps[i]) * _UNITS, (1 - y.place(values[i])) * _UNITS
        words.append(f"{pen}{across:.1f} {down:.1f}")
        pen = "L"
    return el("path", d="".join(words), class_=kind, vector_effect="non-scaling-stroke")


def _marks(line: Line, x: Scale, y: Scale, best: tuple[int, float] | None) -> Html:
    """Draw dots where points are few, a ring around the best, a cross where a curve breaks off."""
    points = list(zip(line.series.steps, line.series.values, strict=True))
    finite = [point for point in points if math.isfinite(point[1])]
    few = finite if len(points) <= _FEW[line.name] else []
    marks = [_dot(x, y, point, 2.5) for point in few]
    if best is not None:
        marks.append(_dot(x, y, best, 5, class_="best"))
    marks += [
        el("text", "×", x=_percent(x.place(step)), y=0, dy="0.7em", class_="broken")
        for step in _broken(points)
    ]
    return el("g", join(marks), class_=f"marks {line.name}")


_FEW = {"train": 3, "valid": 40}
"""A curve with at most this many points shows each of them as a dot."""


def _best(chart: Chart, line: Line) -> tuple[int, float] | None:
    """Return step and value of the best validation result."""
    points = zip(line.series.steps, line.series.values, strict=True)
    finite = [point for point in points if math.isfinite(point[1])]
    if line.name != "valid" or len(finite) < 2:
        return None
    choose = min if smaller_is_better(chart.title) else max
    return choose(finite, key=lambda point: point[1])


def _broken(points: Sequence[tuple[int, float]]) -> list[int]:
    """Return the steps at which a curve stops being finite."""
    before = [True, *(math.isfinite(value) for _, value in points)]
    return [
        step
        for (step, value), fine in zip(points, before, strict=False)
        if fine and not math.isfinite(value)
    ]


def _dot(x: Scale, y: Scale, point: tuple[int, float], size: float, **kind: str) -> Html:
    step, value = point
    at = {"cx": _percent(x.place(step)), "cy": _percent(1 - y.place(value))}
    return el("circle", **at, r=size, **kind)


def _spoken(chart: Chart) -> str:
    """Describe the chart for screen readers."""
    words = []
    for line in chart.lines:
        values = [v for v in line.series.values if math.isfinite(v)] or [math.nan]
        best = min(values) if smaller_is_better(chart.title) else max(values)
        words.append(
            f"{line.name} from {figure(values[0])} to {figure(values[-1])}, at best {figure(best)}"
        )
    return f"{chart.title} over the steps: {'; '.join(words)}"


def _percent(place: float) -> str:
    return f"{100 * place:.2f}%"


# Fewer points that draw the same curve


LIMIT = 1000


def downsample(values: Sequence[float], limit: int = LIMIT) -> list[int]:
    """Choose the points to keep: both ends, and the extremes of each stretch.

    The first non-finite value of a stretch counts as an extreme.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = (limit - 2) // 3
    edges = [1 + (count - 2) * i // stretches for i in range(stretches + 1)]
    kept = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        kept |= _extremes(values, start, stop)
    return sorted(kept)


def _extremes(values: Sequence[float], start: int, stop: int) -> set[int]:
    finite = [i for i in range(start, stop) if math.isfinite(values[i])]
    kept = {next((i for i in range(start, stop) if not math.isfinite(values[i])), start)}
    if finite:
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return kept


def smoothed(values: Sequence[float], window: float) -> list[float]:
    """Return the moving average over about `window` points, unbiased from the first point.

    A non-finite value leaves a gap and does not affect later averages.
    """
    keep = 1 - 1 / max(1.0, window)
    total, weight = 0.0, 0.0
    result: list[float] = []
    for value in values:
        if math.isfinite(value):
            total, weight = total * keep + value, weight * keep + 1
        result.append(total / weight if math.isfinite(value) else math.nan)
    return result
