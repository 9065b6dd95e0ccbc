"""Files that say what the folder they lie in holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError

SEAL = "sha256"
"""The key under which a description holds the digest of all else it says."""


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with a digest of themselves."""
    return {**{key: value for key, value in facts.items() if key != SEAL}, SEAL: _digest(facts)}


def check_seal(path: Path, facts: Mapping[str, Any]) -> None:
    """Refuse facts that are not those that were written; files of before have no digest."""
    if SEAL in facts and facts[SEAL] != _digest(facts):
        raise DataError(f"{path}: corrupt: it is not as it was written, its checksum is wrong")


def _digest(facts: Mapping[str, Any]) -> str:
    """Of what is said, and not of how it is laid out: a copy that is indented anew is whole."""
    plain = json.loads(json.dumps({key: value for key, value in facts.items() if key != SEAL}))
    text = json.dumps(plain, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_description(path: Path, form: str, version: int, what: str) -> dict[str, Any]:
    """The facts in a file of this format and version; refuses one that is missing or foreign."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path.parent}: not a folder of {what}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != form:
        raise DataError(f'{path}: does not describe {what} (no "format": "{form}")')
    if facts.get("version") != version:
        raise DataError(
            f"{path}: written by version {facts.get('version')} of the format; "
            f"this program reads version {version}"
        )
    check_seal(path, facts)
    return facts
