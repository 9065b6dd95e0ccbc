"""A YAML file plus `key.path=value` overrides → a checked job."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.core.config.base import Contradiction
from echelon.core.config.checked import checked
from echelon.core.config.document import Document, parse_value, read_document
from echelon.core.config.job import Job
from echelon.core.errors import ConfigError, KeyPath

Check = Callable[[Job], None]


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job and the document it was read from."""

    job: Job
    document: Document


def load_job(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    checks: Sequence[Check] = (),
) -> JobFile:
    """Read, override and check a job; every fault is one line with file, line, rule, choice."""
    document = read_document(path) if path is not None else Document({})
    return build_job(overridden(document, overrides), checks=checks)


def job_from(values: Mapping[str, Any], *, checks: Sequence[Check] = ()) -> Job:
    """A job from Python values, checked like a file."""
    return build_job(Document(dict(values)), checks=checks).job


def build_job(document: Document, *, checks: Sequence[Check] = ()) -> JobFile:
    try:
        job = checked(Job, document.values)
        for check in checks:
            check(job)
    except ConfigError as error:
        about = error.paths if isinstance(error, Contradiction) else (error.path,)
        raise ConfigError(document.where(*about) + error.message, error.path) from None
    return JobFile(job, document)


def overridden(document: Document, overrides: Sequence[str]) -> Document:
    """The document as `key.path=value` changes it."""
    values = copy.deepcopy(document.values)
    paths: set[KeyPath] = set()
    for text in overrides:
        key, separator, raw = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {text!r} must look like key.path=value")
        paths.add(_set(values, key.split("."), parse_value(raw), text))
    return dataclasses.replace(document, values=values, overridden=frozenset(paths))


def _set(values: dict[str, Any], keys: Sequence[str], value: Any, text: str) -> KeyPath:
    """Returns the path as messages know it, rows of a list by their numbers."""
    at: Any = values
    path: list[str | int] = []
    for key in keys:
        if not isinstance(at, dict | list):
            raise ConfigError(f"override {text!r}: {path[-1]!r} is a value, it has no key {key!r}")
        place: Any = _place(at, key, text) if isinstance(at, list) else key
        path.append(place)
        if len(path) == len(keys):
            at[place] = value
        elif isinstance(at, list):
            at = at[place]
        else:
            at = at.setdefault(place, {})
    return tuple(path)


def _place(items: list[Any], part: str, text: str) -> int:
    """Rows of a list go by their number, from 0."""
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(
            f"override {text!r}: {part!r} must be the number of an item, 0 to {len(items) - 1}"
        )
    return int(part)
