"""Times, curves and JSON as people and programs read them: progress, report, command line."""

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


def warn(message: str) -> None:
    """One line on stderr. Where even that is closed, there is nobody left to tell."""
    with suppress(OSError, ValueError):
        print(f"echelon: {message}", file=sys.stderr, flush=True)


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
