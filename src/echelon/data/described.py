"""Files that say what the folder they lie in holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError


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
    return facts
