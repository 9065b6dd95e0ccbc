"""What each trainer and each server of a run did, in rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_STALENESS = "staleness_"
_TRAINERS = (
    *("trainer", "updates", "mean staleness", "updates by staleness", "pushed", "pulled"),
    *("waited", "refused", "sent twice"),
)
_JUDGED = ("merit", "rejected")
_SERVERS = ("server", "updates", "applying")
_SHARED = "in memory"


class Rows(NamedTuple):
    heads: tuple[str, ...]
    rows: list[list[str]]


def node_rows(found: Mapping[str, Any]) -> list[Rows]:
    """Of trainers and of servers; `found` as a run's summary has it."""
    trainers, servers = found.get("trainers", {}), found.get("servers", {})
    judged = any("merit" in figures for figures in trainers.values())
    heads = (*_TRAINERS, *(_JUDGED if judged else ()))
    rows = [_trainer(name, figures, judged=judged) for name, figures in trainers.items()]
    return [
        Rows(heads, rows),
        Rows(_SERVERS, [_server(name, figures) for name, figures in servers.items()]),
    ]


def _trainer(name: str, figures: Mapping[str, float], *, judged: bool) -> list[str]:
    ages = {
        int(key.removeprefix(_STALENESS)): int(count)
        for key, count in figures.items()
        if key.startswith(_STALENESS)
    }
    count = sum(ages.values())
    mean = sum(age * n for age, n in ages.items()) / count if count else 0.0
    row = [
        name,
        f"{figures.get('applied', 0):,.0f}",
        f"{mean:.2f}",
        ", ".join(f"{age}: {n:,}" for age, n in sorted(ages.items())) or "–",
        _bytes(figures.get("bytes_pushed", 0.0)),
        _bytes(figures.get("bytes_pulled", 0.0)),
        f"{figures.get('wait_seconds', 0.0):.1f} s",
        f"{figures.get('refused', 0):,.0f}",
        f"{figures.get('duplicates', 0):,.0f}",
    ]
    merit = f"{figures['merit']:.2f}" if "merit" in figures else "–"
    return [*row, merit, f"{figures.get('rejected', 0):,.0f}"] if judged else row


def _server(name: str, figures: Mapping[str, float]) -> list[str]:
    return [name, f"{figures.get('rounds', 0):,.0f}", f"{figures.get('apply_seconds', 0.0):.2f} s"]


def _bytes(count: float) -> str:
    """Over connections; between processes of one host nothing is sent."""
    if not count:
        return _SHARED
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
