"""Plain values → a section, strictly; what is wrong is said in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from echelon.core.config.base import Contradiction, Section, SettingError
from echelon.core.errors import ConfigError, KeyPath, nearest

S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Mapping[str, Any], at: KeyPath = ()) -> S:
    """`values` as a section that stands `at` this place of a job; the first fault raises."""
    try:
        # Through JSON: strict there refuses "32" for 32 but still takes a list for a tuple.
        return kind.model_validate_json(json.dumps(dict(values)), strict=True)
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{_dotted(at)}a value is not plain data: {error}", at) from None
    except ValidationError as error:
        faults = error.errors(include_url=False)
        inside = _known_part(kind, faults[0]["loc"])
        one = [fault for fault in faults if _known_part(kind, fault["loc"]) == inside]
        more = f" (and {len(faults) - len(one)} more)" if len(faults) > len(one) else ""
        message = _explained(kind, one, inside, at) + more
        raised = faults[0].get("ctx", {}).get("error")
        if isinstance(raised, SettingError):
            paths = tuple((*at, *inside, *key) for key in raised.keys)
            raise Contradiction(message, paths) from None
        raise ConfigError(message, (*at, *inside)) from None


def _dotted(path: KeyPath) -> str:
    """`a.b: `, or nothing for the job itself."""
    return ".".join(map(str, path)) + ": " if path else ""


def _explained(
    kind: type[Section], one: Sequence[Mapping[str, Any]], inside: KeyPath, at: KeyPath
) -> str:
    """`one` fault is several to pydantic where a setting may be this or that."""
    fault = one[0]
    key = ".".join(map(str, (*at, *inside)))
    if fault["type"] == "extra_forbidden":
        fields = _section_at(kind, inside[:-1]).model_fields
        choices = sorted(field.alias or name for name, field in fields.items())
        hint = _hint(str(inside[-1]), choices)
        return f"key {key!r} is unknown{hint} (choices: {', '.join(choices)})"
    if fault["type"] == "missing":
        return f"key {key!r} is missing"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    value, rule = fault["input"], " or ".join(_rule(each, one) for each in one)
    words = [
        word
        for each in one
        if each["type"] == "literal_error"
        for word in str(each["ctx"]["expected"]).split("'")[1::2]
    ]
    hint = _hint(value, words) if isinstance(value, str) else ""
    return f"{key} = {value!r}: {rule[0].lower()}{rule[1:]}{hint}"


def _rule(fault: Mapping[str, Any], one: Sequence[Mapping[str, Any]]) -> str:
    said = str(fault["msg"])
    return said if fault is one[0] else said.removeprefix("Input should be ")


def _hint(value: str, choices: list[str]) -> str:
    near = nearest(value, choices)
    return f"; did you mean {near!r}?" if near else ""


def _known_part(kind: type[Section], loc: Sequence[str | int]) -> KeyPath:
    """Keys and places in lists, without what pydantic adds for the branches of a union."""
    path: list[str | int] = []
    section: type[Section] | None = kind
    for part in loc:
        if isinstance(part, int):  # a place in a list: what stands there is of the list's kind
            path.append(part)
        elif section is not None:
            path.append(part)
            field = section.model_fields.get(part)
            section = _section_in(field.annotation) if field is not None else None
    return tuple(path)


def _section_at(kind: type[Section], path: KeyPath) -> type[Section]:
    for part in path:
        if isinstance(part, int):
            continue
        inner = _section_in(kind.model_fields[part].annotation)
        assert inner is not None, f"{part} is no section"
        kind = inner
    return kind


def _section_in(annotation: Any) -> type[Section] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
