"""Compares every byte of sets of shards with its checksum, and collects all damages.

In prepared data the manifests and all other files that have a checksum are compared too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError
from echelon.data.shards.layout import (
    MANIFEST,
    PREPARED,
    Manifest,
    ShardEntry,
    changed,
    read_facts,
    read_manifest,
    shard_sets,
)
from echelon.data.shards.read import damages, open_shard


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage: a message, and the records of the set that may be damaged."""

    file: str
    message: str
    records: tuple[int, int] | None = None
    columns: tuple[str, ...] = ()
    """Columns that may be damaged; empty if unknown."""


@dataclass(slots=True)
class Verified:
    """What was read, and all damages."""

    folder: str
    sets: int = 0
    shards: int = 0
    records: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len({finding.file for finding in self.findings})

    def as_data(self) -> dict[str, Any]:
        return {"ok": not self.findings, **asdict(self)}


def verify(folder: str | Path) -> Verified:
    """Read all shards of a folder, or of all sets in it, and return every damage.

    Raises DataError only if this is not a folder of shards at all.
    """
    found, path = Verified(str(folder)), Path(folder)
    described = _verify_prepared(path, found)
    sets = _sets(path, described)
    with ThreadPoolExecutor(os.cpu_count(), "echelon-verify") as pool:
        try:
            for shard_set in sets:
                _verify_set(shard_set, found, pool)
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def _verify_prepared(folder: Path, found: Verified) -> bool:
    """Return whether this is prepared data; if so, check all its files that are not shards."""
    try:
        facts = read_facts(folder, changed=True)  # `changed` below reports changed facts
    except DataError as error:
        found.findings.append(Finding(str(folder / PREPARED), str(error)))
        return True
    if facts is None:
        return False
    found.findings += [
        Finding(str(path), f"{path}: {what}") for path, what in changed(folder, facts)
    ]
    return True


def _sets(folder: Path, described: bool) -> list[Path]:
    try:
        return list(shard_sets(folder).values())
    except DataError:
        if described:  # its manifests are missing, which `changed` has reported
            return []
        raise


def _verify_set(folder: Path, found: Verified, pool: ThreadPoolExecutor) -> None:
    found.sets += 1
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        found.findings.append(Finding(str(folder / MANIFEST), str(error)))
        return
    found.shards += len(manifest.shards)
    found.records += manifest.rows
    found.bytes += manifest.bytes
    waiting = [
        pool.submit(lambda *shard: list(_findings(*shard)), folder, manifest, entry, first)
        for entry, first in manifest.numbered()
    ]
    for future in waiting:
        found.findings += future.result()


def _findings(folder: Path, manifest: Manifest, entry: ShardEntry, first: int) -> Iterator[Finding]:
    path = str(folder / entry.file)
    try:
        shard = open_shard(folder, manifest, entry, first)
    except DataError as error:
        yield Finding(path, str(error), (first, first + entry.rows - 1))
        return
    for damage in damages(shard, manifest.block):
        yield Finding(path, str(damage), damage.records, tuple(damage.hit))
