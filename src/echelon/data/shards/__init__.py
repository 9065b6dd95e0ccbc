"""Data on disk: folders of memory-mapped Arrow files with a manifest."""

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
