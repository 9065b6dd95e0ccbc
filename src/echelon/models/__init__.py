"""Model families, one file each, and the registry that builds them by name.

    registry.py    names → options and models, sized for the data; start here
    layers.py      parts that families share
    table.py       embedding tables without a vocabulary
    softmax, mlp, cnn, alexnet, resnet (vectors and images), textcnn, gpt (texts), dlrm (categories)

A family defines its options (`Options`, a section of a job) and `from_facts`, which builds the
model. torch is imported when a family or a layer is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.lazy import lazily
from echelon.models.registry import InputFacts, build, names, options, schema

if TYPE_CHECKING:
    from echelon.models.layers import Normalise
    from echelon.models.table import Table

__all__ = ["InputFacts", "Normalise", "Table", "build", "names", "options", "schema"]

__getattr__ = lazily(__name__, {"layers": ("Normalise",), "table": ("Table",)})
