"""Values as they are shown: short, plain, and without anything a terminal would obey."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from echelon.core.figures import figure
from echelon.data.inspect.distinct import Count

LONGEST = 300
_ITEMS = 12


def shown(value: Any) -> Any:
    """As JSON can hold it; what is long is cut and says so."""
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
    """On one line."""
    if value is None:
        return "–"
    found = shown(value)
    text = found if isinstance(found, str) else _items(found)
    if not text:
        return "(empty)"
    return "".join(c if c.isprintable() else "␣" if c.isspace() else "�" for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def share(part: int, whole: int) -> str:
    """3.1 %, and never 0 or 100 % for what is neither none nor all."""
    if not part or part == whole:
        return "0 %" if not part else "100 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if percent < 99.95 else ">99.9 %"


def number(value: float) -> str:
    """As many digits as are of use: 1,400,000, 38.58, 0.002."""
    if math.isfinite(value) and 1e6 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return figure(value)


def told(count: Count) -> str:
    """A number of different values; an estimate says that it is one."""
    return f"{count.value:,}" if count.exact else f"≈ {count.value:,}"


def _items(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_items(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_items(item)}" for key, item in value.items()) + "}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
