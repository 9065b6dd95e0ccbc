"""Shards: training data on disk, as folders of memory-mapped Arrow files with a manifest.

    columns ── encode ──▶ Arrow columns ── write ──▶ shard-00000.arrow, …, manifest.json
    manifest, shards ── read ──▶ ShardSource ──▶ batches

`layout` defines what a folder of shards contains. `verify` compares every byte with its checksum,
`reshard` writes the same records as another number of shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.lazy import lazily

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
__getattr__ = lazily(  # writing shards does not need torch
    __name__,
    {
        "layout": ("Manifest", "ShardEntry", "read_manifest", "Field", "Schema"),
        "read": ("ShardSource", "verify_shards"),
        "write": ("write_shards",),
    },
)
