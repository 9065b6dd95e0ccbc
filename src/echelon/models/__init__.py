"""Model families and their registry. torch is imported when a family or a layer is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.process import lazily
from echelon.models.registry import InputFacts, build, names, options, schema

if TYPE_CHECKING:
    from echelon.models.layers import Normalise
    from echelon.models.table import Table

__all__ = ["InputFacts", "Normalise", "Table", "build", "names", "options", "schema"]

__getattr__ = lazily(__name__, {"layers": ("Normalise",), "table": ("Table",)})
