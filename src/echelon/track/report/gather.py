"""Everything a report tells, read from the store and the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.track.records import Event, Run, Series, is_number
from echelon.track.store import Store

EVALUATION = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the trained model does with held-out samples; any part may be missing."""

    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    """Row: what it is; column: what it was taken for."""
    samples: tuple[Mapping[str, str], ...] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """One report's worth of facts."""

    run: Run
    series: Mapping[str, Series]
    events: tuple[Event, ...]
    outcome: Outcome = field(default_factory=Outcome)


def gather(store: Store, run_id: str) -> Contents:
    run = store.run(run_id)
    series = {name: store.series(run.id, name) for name in store.names(run.id)}
    outcome = read_outcome(run.folder / EVALUATION)
    return Contents(run, series, tuple(store.events(run.id)), outcome)


def read_outcome(path: Path) -> Outcome:
    """What `evaluation.json` says; a file that makes no sense is told, not fatal."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _outcome(found)
    except FileNotFoundError:
        return Outcome()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Outcome(fault=f"{path.name} cannot be shown: {error}")


def _outcome(found: Mapping[str, Any]) -> Outcome:
    rows = tuple(tuple(row) for row in found.get("confusion") or ())
    if any(len(row) != len(rows) or not all(map(is_number, row)) for row in rows):
        raise ValueError("confusion must be a square matrix of counts")
    labels = tuple(str(label) for label in found.get("labels") or ())
    samples = tuple(_words(sample) for sample in found.get("samples") or ())
    missing = tuple(str(i) for i in range(len(labels), len(rows)))  # classes without a name
    return Outcome((labels + missing)[: max(len(rows), len(labels))], rows, samples)


def _words(sample: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(sample.get(key) or "") for key in ("input", "output", "target")}
