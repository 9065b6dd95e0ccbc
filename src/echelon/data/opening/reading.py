"""How new records are read for a model of prepared data: as its recipe has read the old ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from echelon.data.opening.frames import Usual
from echelon.data.prepare.inputs import OPTIONS

_STORED = "image"
"""What recipes call images that nobody has decoded yet; one that reads pixels says `x`."""


def settings_of(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By format: what all inputs of a recipe say alike. Where they differ, new records cannot tell
    which of them they are like."""
    first, *others = facts["recipe"]["read"]
    alike = {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }
    formats = sorted({entry["format"] for entry in facts["inputs"]})
    # Not which columns to read: what is needed is looked for by its name.
    known = {format: OPTIONS[format] - {"columns"} for format in formats}
    found = {
        format: {name: value for name, value in alike.items() if name in known[format]}
        for format in formats
    }
    return {format: settings for format, settings in found.items() if settings}


def usual_options(fitted: Mapping[str, Any], needed: Collection[str]) -> Usual:
    """Options of the readers of records that are to have the columns `needed`."""
    kept: Mapping[str, Mapping[str, Any]] = fitted.get("reading", {})
    usual = {format: dict(settings) for format, settings in kept.items()}
    for format in ("csv", "tsv"):
        settings = usual.setdefault(format, {})
        if "names" in settings:  # files with a header of these names will do as well
            settings.pop("header", None)
        settings["types"] = dict.fromkeys(fitted["texts"], "string")
    if _STORED in needed:
        usual["images"] = {"stored": True}
    return usual
