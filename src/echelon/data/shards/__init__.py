"""Data on disk: folders of memory-mapped Arrow files with a manifest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.data.shards.manifest import Manifest, ShardEntry, read_manifest
    from echelon.data.shards.schema import Field, Schema
    from echelon.data.shards.source import ShardSource, verify_shards
    from echelon.data.shards.write import write_shards

__all__ = [
    "Field",
    "Manifest",
    "Schema",
    "ShardEntry",
    "ShardSource",
    "read_manifest",
    "verify_shards",
    "write_shards",
]

_WHERE = {
    "Field": "schema",
    "Manifest": "manifest",
    "Schema": "schema",
    "ShardEntry": "manifest",
    "ShardSource": "source",
    "read_manifest": "manifest",
    "verify_shards": "source",
    "write_shards": "write",
}


def __getattr__(name: str) -> Any:
    """Imported on use: who only writes shards does without torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
