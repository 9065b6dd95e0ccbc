"""Figures and times as people read them; used by progress, report and command line alike."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def warn(message: str) -> None:
    """One line on stderr. Where even that is closed, there is nobody left to tell."""
    with suppress(OSError, ValueError):
        print(f"echelon: {message}", file=sys.stderr, flush=True)


def figure(value: float) -> str:
    """Four significant digits, without noise: 0.9725, 12.3, 1e-05."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if abs(value) < 1e6 and (abs(value) >= 1000 or value == int(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def short(value: float) -> str:
    """A count or a rate at a glance: 950, 1.2k, 39.4M."""
    for size, unit in _UNITS:
        if abs(value) >= size * 0.99995:
            return f"{value / size:.3g}{unit}" if abs(value) < size * 999.5 else f"{value:.2g}"
    return f"{value:.3g}"


def size(count: float) -> str:
    """Bytes: 23.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """40 ms, 0.8 s, 42 s, 3 min 07 s, 2 h 15 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{minutes} min {rest:02d} s"
    if whole < 86_400:
        return f"{hours} h {minutes_left:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def clock(seconds: float) -> str:
    """0:12, 3:07, 2:15:00: keeps its width while it counts."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve on one line; a figure that is not finite shows as `×`."""
    if not values:
        return ""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    groups = [values[a:b] for a, b in itertools.pairwise(edges) if a < b]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((mean - low) * scale)] if math.isfinite(mean) else "×" for mean in means
    )


def to_json(value: Any) -> str:
    """Strict JSON: what is not finite is null, what is not plain is its text."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
