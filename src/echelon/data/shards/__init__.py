"""Data on disk: folders of memory-mapped Arrow files with a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.process import lazily

if TYPE_CHECKING:
    from echelon.data.shards.layout import Field, Manifest, Schema, ShardEntry, read_manifest
    from echelon.data.shards.read import ShardSource, verify_shards
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
__getattr__ = lazily(  # who only writes shards does without torch
    __name__,
    {
        "layout": ("Manifest", "ShardEntry", "read_manifest", "Field", "Schema"),
        "read": ("ShardSource", "verify_shards"),
        "write": ("write_shards",),
    },
)
