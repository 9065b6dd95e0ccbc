"""What a folder of prepared data says of itself, beside its shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.core.errors import DataError
from echelon.data.described import check_seal
from echelon.data.shards.manifest import PREPARED


def read_facts(folder: Path, *, changed: bool = False) -> dict[str, Any] | None:
    """What the preparation told; None where there was none. Facts that were `changed` since are
    refused, unless asked for."""
    path = folder / PREPARED
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("checksums"), dict):
        raise DataError(f"{path}: does not describe prepared data (it has no checksums)")
    if not changed:
        check_seal(path, facts)
    return facts


def changed(folder: Path, facts: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """The files that are not as the preparation left them, each with what is wrong."""
    try:
        check_seal(folder / PREPARED, facts)
    except DataError as error:
        yield folder / PREPARED, str(error).removeprefix(f"{folder / PREPARED}: ")
    for name, expected in facts["checksums"].items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield folder / PREPARED, f"names a file outside of the folder: {name!r}"
            continue
        try:
            found = checksum(path)
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"
            continue
        if found != expected:
            yield path, "corrupt: its checksum is wrong"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def how_prepared(facts: Mapping[str, Any]) -> str:
    """`prepared from 1,000 records: 12 duplicate, 8 length taken out, 980 kept`."""
    counts = facts.get("counts") or {}
    out = ", ".join(f"{count:,} {reason}" for reason, count in (counts.get("out") or {}).items())
    taken = f"taken out: {out}" if out else "none taken out"
    read, kept = counts.get("read", 0), counts.get("kept", 0)
    return f"prepared from {read:,} records; {taken}; {kept:,} kept"
