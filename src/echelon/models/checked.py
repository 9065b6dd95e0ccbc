"""Values from a job → a section, strictly; what is wrong is said in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from echelon.core.config.base import Section
from echelon.core.errors import ConfigError, KeyPath, nearest

S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Mapping[str, Any], at: KeyPath) -> S:
    """`values` as a section found `at` this place in a job; the first fault raises."""
    try:
        # Through JSON, as a whole job is: "64" is no number, but a list will do for a tuple.
        return kind.model_validate_json(json.dumps(dict(values)), strict=True)
    except TypeError as error:
        raise ConfigError(f"{_dotted(at)}: a value is not plain data: {error}", at) from None
    except ValidationError as error:
        faults = error.errors(include_url=False)
        path = at + _known_part(faults[0]["loc"])
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ConfigError(_explained(kind, dict(faults[0]), path) + more, path) from None


def _known_part(loc: tuple[int | str, ...]) -> KeyPath:
    """The option and the place in its list, without what pydantic adds for unions."""
    return (*loc[:1], *(part for part in loc[1:] if isinstance(part, int)))


def _explained(kind: type[Section], fault: Mapping[str, Any], path: KeyPath) -> str:
    if fault["type"] == "extra_forbidden":
        choices = sorted(kind.model_fields)
        hint = _hint(str(path[-1]), choices)
        return f"key {_dotted(path)!r} is unknown{hint} (choices: {', '.join(choices)})"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    value, rule = fault["input"], str(fault["msg"])
    hint = ""
    if fault["type"] == "literal_error":
        hint = _hint(str(value), str(fault["ctx"]["expected"]).split("'")[1::2])
    return f"{_dotted(path)} = {value!r}: {rule[0].lower()}{rule[1:]}{hint}"


def _hint(value: str, choices: list[str]) -> str:
    near = nearest(value, choices)
    return f"; did you mean {near!r}?" if near else ""


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
