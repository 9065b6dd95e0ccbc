"""Model families and their registry. torch is imported when a family or a layer is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.lazy import lazily
from echelon.models.facts import InputFacts
from echelon.models.registry import build, names, options, schema

if TYPE_CHECKING:
    from echelon.models.normalise import Normalise
    from echelon.models.table import Table

__all__ = ["InputFacts", "Normalise", "Table", "build", "names", "options", "schema"]

__getattr__ = lazily(__name__, {"normalise": ("Normalise",), "table": ("Table",)})
