"""Text for people: numbers, sizes, durations, curves and arbitrary values, plus JSON and `warn`.

Progress, reports and the command line all format through here, so that a number looks the same
everywhere. `shown` and `line` are for values from the user's data: they are shortened, and `line`
drops what a terminal would obey.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


def warn(message: str) -> None:
    """Print one line on stderr; do nothing if stderr is closed."""
    with suppress(OSError, ValueError):
        print(f"echelon: {message}", file=sys.stderr, flush=True)


# Numbers


def figure(value: float) -> str:
    """Format a metric with four significant digits: 0.9725, 12.3, 1e-05."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if abs(value) < 1e6 and (abs(value) >= 1000 or value == int(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def number(value: float) -> str:
    """Format a number of a data profile; unlike `figure`, large ones in full: 1,400,000, 38.58."""
    if math.isfinite(value) and 1e6 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return figure(value)


def short(value: float) -> str:
    """Format a count or a rate with three digits: 950, 1.2k, 39.4M."""
    for size, unit in _UNITS:
        if abs(value) >= size * 0.99995:
            return f"{value / size:.3g}{unit}" if abs(value) < size * 999.5 else f"{value:.2g}"
    return f"{value:.3g}"


def size(count: float) -> str:
    """Format a number of bytes: 23.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def share(part: int, whole: int) -> str:
    """Format a percentage: 3.1 %. Only none is 0 %, and only all is 100 %."""
    if not part or part == whole:
        return "0 %" if not part else "100 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if percent < 99.95 else ">99.9 %"


_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


# Times


def duration(seconds: float) -> str:
    """Format seconds in the unit that fits: 40 ms, 0.8 s, 42 s, 3 min 07 s, 2 h 15 min, 3 d 4 h."""
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
    """Format seconds as a running clock, whose width stays while it counts: 0:12, 3:07, 2:15:00."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def when(moment: float) -> str:
    """Format a Unix time as local date and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


# Curves

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw a curve on one line of text. A bar that is not finite shows as `×`."""
    if not values:
        return ""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    groups = [values[a:b] for a, b in itertools.pairwise(edges) if a < b]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((mean - low) * scale)] if math.isfinite(mean) else "×" for mean in means
    )


# Values from the user's data

LONGEST = 300
_ITEMS = 12


def shown(value: Any) -> Any:
    """Return the value as plain data that is short: long texts and lists are cut, and say so."""
    import numpy as np

    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}" if value.ndim > 1 else shown(value.tolist())
    if isinstance(value, list | tuple):
        more = [f"… {len(value) - _ITEMS:,} more"] if len(value) > _ITEMS else []
        return [shown(item) for item in value[:_ITEMS]] + more
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    return cut(str(value))


def line(value: Any) -> str:
    """Return the value as one line of text without control characters."""
    if value is None:
        return "–"
    found = shown(value)
    text = found if isinstance(found, str) else _items(found)
    if not text:
        return "(empty)"
    return "".join(c if c.isprintable() else "␣" if c.isspace() else "�" for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _items(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_items(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_items(item)}" for key, item in value.items()) + "}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# JSON


def to_json(value: Any) -> str:
    """Return strict JSON: numbers that are not finite become null, other objects their text."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Return the value as `to_json` encodes it, made of plain data."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
