"""Every kind of cleaning step, imported when a recipe asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.data.prepare.kinds import chosen
from echelon.data.prepare.step import Step

_HERE = "echelon.data.prepare.clean"
STEPS: Mapping[str, str] = {
    "text": f"{_HERE}.text:Text",
    "length": f"{_HERE}.length:Length",
    "missing": f"{_HERE}.missing:Missing",
    "range": f"{_HERE}.range:Range",
    "types": f"{_HERE}.types:Types",
    "duplicates": f"{_HERE}.duplicates:Duplicates",
    "noise": f"{_HERE}.noise:Noise",
}
"""Kind → `module:Class`."""


def step_kind(kind: str) -> type[Step]:
    """The class of a kind of step."""
    found: type[Step] = chosen("kind of cleaning", kind, STEPS)
    return found
