"""Which curves a run has, and how they are put together into charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.track.records import Series, smaller_is_better

_BESIDE = {
    "lr": "Learning rate",
    "samples_per_s": "Samples per second",
    "grad_norm": "Gradient norm",
}
_NOT_DRAWN = frozenset({"epoch", "samples", "seconds", "steps_per_s"})
_LARGEST = 1e100
_NOISY = frozenset({"loss", "grad_norm", "samples_per_s"})


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; `name` is the part it was measured on: train or valid."""

    name: str
    series: Series
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one figure over the steps."""

    title: str
    lines: tuple[Line, ...]
    may_be_log: bool = False
    from_zero: bool = False
    top: float | None = None
    minor: bool = False


def charts(series: Mapping[str, Series]) -> list[Chart]:
    """Loss first, then the metrics, then what is looked at beside them."""
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


def _bounded(series: Series) -> Series:
    """What is too large to draw is as good as not finite."""
    return series._replace(values=[v if abs(v) < _LARGEST else math.nan for v in series.values])


def _is_share(lines: tuple[Line, ...]) -> bool:
    """Accuracy, recall, AUC and their like never leave [0, 1]."""
    values = [value for line in lines for value in line.series.values if math.isfinite(value)]
    return bool(values) and min(values) >= 0 and max(values) <= 1
