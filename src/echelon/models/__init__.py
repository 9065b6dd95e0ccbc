"""Model families and their registry. torch is imported when a family or a layer is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.models.facts import InputFacts
from echelon.models.registry import build, names, options, schema

if TYPE_CHECKING:
    from echelon.models.normalise import Normalise
    from echelon.models.table import Table

__all__ = ["InputFacts", "Normalise", "Table", "build", "names", "options", "schema"]


def __getattr__(name: str) -> Any:
    if name == "Normalise":
        from echelon.models.normalise import Normalise

        return Normalise
    if name == "Table":
        from echelon.models.table import Table

        return Table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
