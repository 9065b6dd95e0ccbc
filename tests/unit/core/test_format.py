"""Figures and times as people read them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from echelon.core import format


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.97251, "0.9725"),
        (450.0, "450"),
        (1652.7, "1,653"),
        (1e-5, "1e-05"),
        (3.5e7, "3.5e+07"),
        (0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_figures(value: float, said: str) -> None:
    assert format.figure(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(950, "950"), (1234, "1.23k"), (999_999, "1M"), (11_689_512, "11.7M"), (2.5e9, "2.5G")],
)
def test_counts_at_a_glance(value: float, said: str) -> None:
    assert format.short(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(512, "512 B"), (25_274_793_984, "25.3 GB"), (4e12, "4 TB")]
)
def test_sizes(value: float, said: str) -> None:
    assert format.size(value) == said


@pytest.mark.parametrize(
    ("seconds", "said", "clock"),
    [
        (0.04, "40 ms", "0:00"),
        (9.04, "9.0 s", "0:09"),
        (42.4, "42 s", "0:42"),
        (187, "3 min 07 s", "3:07"),
        (8100, "2 h 15 min", "2:15:00"),
        (273_600, "3 d 4 h", "76:00:00"),
        (math.inf, "–", "–"),
    ],
)
def test_durations(seconds: float, said: str, clock: str) -> None:
    assert format.duration(seconds) == said
    assert format.clock(seconds) == clock


def test_a_sparkline_rises_with_its_values() -> None:
    assert format.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_a_long_series_fits_the_line_and_a_broken_value_shows() -> None:
    line = format.sparkline([float(i) for i in range(1000)] + [math.nan], width=20)
    assert len(line) == 20
    assert line[0] == "▁"
    assert line[-1] == "×"


@pytest.mark.parametrize(("values", "line"), [([], ""), ([3.0], "▁"), ([2.0, 2.0], "▁▁")])
def test_a_flat_or_empty_sparkline(values: list[float], line: str) -> None:
    assert format.sparkline(values) == line


def test_json_is_strict() -> None:
    said = format.to_json({"a": math.nan, "b": (1, Path("x")), 3: {"c": math.inf}, "d": None})
    assert json.loads(said) == {"a": None, "b": [1, "x"], "3": {"c": None}, "d": None}


def test_a_warning_nobody_can_read_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("closed").open("w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    format.warn("nobody listens")
    assert Path("closed").read_text() == ""
