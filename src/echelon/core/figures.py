"""Numbers as people read them; used by progress, reports and command line alike."""

from __future__ import annotations

import math

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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
