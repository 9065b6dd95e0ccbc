"""A YAML file plus `key.path=value` overrides → a checked job."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from echelon.core.config.document import Document, parse_value, read_document
from echelon.core.config.job import Job
from echelon.core.errors import ConfigError, KeyPath, nearest

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
    return build_job(_overridden(document, overrides), checks=checks)


def job_from(values: Mapping[str, Any], *, checks: Sequence[Check] = ()) -> Job:
    """A job from Python values, checked like a file."""
    return build_job(Document(dict(values)), checks=checks).job


def build_job(document: Document, *, checks: Sequence[Check] = ()) -> JobFile:
    try:
        # Through JSON: strict there refuses "32" for 32 but still takes a list for a tuple.
        job = Job.model_validate_json(json.dumps(document.values), strict=True)
    except TypeError as error:
        raise ConfigError(f"{document.where(())}a value is not plain data: {error}") from None
    except ValidationError as error:
        raise _located(document, error) from None
    for check in checks:
        try:
            check(job)
        except ConfigError as error:
            raise ConfigError(document.where(error.path) + error.message, error.path) from None
    return JobFile(job, document)


def _overridden(document: Document, overrides: Sequence[str]) -> Document:
    values = copy.deepcopy(document.values)
    paths: set[KeyPath] = set()
    for text in overrides:
        key, separator, raw = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {text!r} must look like key.path=value")
        path = tuple(key.split("."))
        _set(values, path, parse_value(raw), text)
        paths.add(path)
    return dataclasses.replace(document, values=values, overridden=frozenset(paths))


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any, text: str) -> None:
    at: Any = values
    for part in path[:-1]:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"override {text!r}: {part!r} is a value, it has no keys")
    at[path[-1]] = value


def _located(document: Document, error: ValidationError) -> ConfigError:
    """The first fault as one line; the others are counted."""
    faults = error.errors(include_url=False)
    path, message = _explain(faults[0])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ConfigError(document.where(path) + message + more, path)


def _explain(fault: Mapping[str, Any]) -> tuple[KeyPath, str]:
    path: KeyPath = _known_part(fault["loc"])
    dotted = ".".join(str(part) for part in path)
    if fault["type"] == "extra_forbidden":
        choices = sorted(_fields_at(path[:-1]))
        near = nearest(str(path[-1]), choices)
        hint = f"; did you mean {near!r}?" if near else ""
        return path, f"key {dotted!r} is unknown{hint} (choices: {', '.join(choices)})"
    if fault["type"] == "value_error":
        return path, str(fault["ctx"]["error"])
    value = fault["input"]
    hint = ""
    if fault["type"] == "literal_error" and isinstance(value, str):
        near = nearest(value, _quoted(str(fault["ctx"]["expected"])))
        hint = f"; did you mean {near!r}?" if near else ""
    rule = str(fault["msg"])
    return path, f"{dotted} = {value!r}: {rule[0].lower()}{rule[1:]}{hint}"


def _quoted(text: str) -> list[str]:
    return text.split("'")[1::2]


def _known_part(loc: Sequence[str | int]) -> KeyPath:
    """The location without what pydantic adds for the branches of a union."""
    path: list[str | int] = []
    model: type[BaseModel] | None = Job
    for part in loc:
        path.append(part)
        field = model.model_fields.get(str(part)) if model is not None else None
        if model is not None and field is None:
            break
        if field is None:
            continue
        model = _section(field.annotation)
        if model is None:
            break
    return tuple(path)


def _fields_at(path: KeyPath) -> list[str]:
    model: type[BaseModel] = Job
    for part in path:
        inner = _section(model.model_fields[str(part)].annotation)
        assert inner is not None, f"{part} is no section"
        model = inner
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
