"""What each trainer and each server of a run did, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.core.html import Html, el, join

_TRAINERS = (
    *("trainer", "updates", "mean staleness", "most", "pushed", "pulled"),
    *("waited", "refused", "sent twice"),
)
_SERVERS = ("server", "updates", "applying")


def nodes(found: Mapping[str, Any]) -> list[Html]:
    """`found` as a run's summary has it: figures by trainer and by server."""
    trainers = [_trainer(name, figures) for name, figures in found.get("trainers", {}).items()]
    servers = [_server(name, figures) for name, figures in found.get("servers", {}).items()]
    return [_table(_TRAINERS, trainers), _table(_SERVERS, servers)]


def _trainer(name: str, figures: Mapping[str, float]) -> list[str]:
    ages = {int(key[10:]): n for key, n in figures.items() if key.startswith("staleness_")}
    count = sum(ages.values())
    mean = sum(age * n for age, n in ages.items()) / count if count else 0.0
    return [
        name,
        f"{figures.get('applied', 0):,.0f}",
        f"{mean:.2f}",
        f"{max(ages, default=0)}",
        _bytes(figures.get("bytes_pushed", 0.0)),
        _bytes(figures.get("bytes_pulled", 0.0)),
        f"{figures.get('wait_seconds', 0.0):.1f} s",
        f"{figures.get('refused', 0):,.0f}",
        f"{figures.get('duplicates', 0):,.0f}",
    ]


def _server(name: str, figures: Mapping[str, float]) -> list[str]:
    return [name, f"{figures.get('rounds', 0):,.0f}", f"{figures.get('apply_seconds', 0.0):.2f} s"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    head = el("tr", *(el("th", text) for text in heads))
    body = [el("tr", *(el("td", text) for text in row)) for row in rows]
    return el("table", el("thead", head), el("tbody", join(body)), class_="nodes")


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
