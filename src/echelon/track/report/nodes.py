"""What each trainer and each server of a run did, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.core.html import Html, el, join
from echelon.track.nodes import Rows, node_rows


def nodes(found: Mapping[str, Any]) -> list[Html]:
    """`found` as a run's summary has it: figures by trainer and by server."""
    return [_table(rows) for rows in node_rows(found)]


def _table(found: Rows) -> Html:
    head = el("tr", *(el("th", text) for text in found.heads))
    body = [el("tr", *(el("td", text) for text in row)) for row in found.rows]
    return el("table", el("thead", head), el("tbody", join(body)), class_="nodes")
