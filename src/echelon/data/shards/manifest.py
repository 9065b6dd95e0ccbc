"""The file that says what a folder of shards holds.

It is written last, so a folder without one is no set of shards, whatever else lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError
from echelon.data.described import read_description
from echelon.data.shards.schema import Field, Schema

MANIFEST = "manifest.json"
PREPARED = "prepared.json"
"""What describes prepared data: splits, each of which is a folder of shards."""
FORMAT = "echelon-shards"
VERSION = 1
BLOCK = 1 << 20
"""Bytes under one checksum: small enough to say which records a damage hit."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One file of a set: how many records, how many bytes, the crc32 of each block."""

    file: str
    rows: int
    bytes: int
    crc32: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "rows": self.rows,
            "bytes": self.bytes,
            "crc32": list(self.crc32),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ShardEntry:
        name = str(plain["file"])
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"file {name!r} is not a plain name")
        crc32 = tuple(int(value) for value in plain["crc32"])
        return cls(name, int(plain["rows"]), int(plain["bytes"]), crc32)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Schema, shards and statistics of a set."""

    schema: Schema
    shards: tuple[ShardEntry, ...]
    statistics: Mapping[str, Mapping[str, Any]]
    block: int = BLOCK

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "schema": [field.to_json() for field in self.schema],
            "statistics": {name: dict(figures) for name, figures in self.statistics.items()},
            "block": self.block,
            "shards": [shard.to_json() for shard in self.shards],
        }


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a folder of shards; refuses one that is missing, foreign or torn."""
    path = Path(folder) / MANIFEST
    return _parse(path, read_description(path, FORMAT, VERSION, "shards"))


def _parse(path: Path, plain: Mapping[str, Any]) -> Manifest:
    try:
        manifest = Manifest(
            tuple(Field.from_json(field) for field in plain["schema"]),
            tuple(ShardEntry.from_json(shard) for shard in plain["shards"]),
            dict(plain["statistics"]),
            int(plain["block"]),
        )
        stated = int(plain["rows"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a whole manifest: {error!r}") from None
    if stated != manifest.rows:
        raise DataError(f"{path}: says {stated} records, but its shards have {manifest.rows}")
    return manifest
