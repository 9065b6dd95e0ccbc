"""Read a job: a YAML file plus `key.path=value` overrides, checked, with errors that name the line.

    read_document     YAML text → values, and the line of every key
    overridden        … with the overrides put in
    checked           values → a section, validated by pydantic in strict mode
    build_job         … → Job, then the caller's checks (strategy, task)

Every fault is one line: `FILE:LINE: what is wrong; did you mean …? (choices: …)`. Errors are raised
with the path of the key, and `build_job` looks up the line: a section need not know its file.
`checked` also serves sections outside a job: model options and recipes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from echelon.core.config.job import Job
from echelon.core.config.sections import Contradiction, Section, SettingError
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
    """Read a job file, apply the overrides and check the result."""
    document = read_document(path) if path is not None else Document({})
    return build_job(overridden(document, overrides), checks=checks)


def job_from(values: Mapping[str, Any], *, checks: Sequence[Check] = ()) -> Job:
    """Return a job made of Python values, checked like a file."""
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
    """Return the document with `key.path=value` overrides applied."""
    values = copy.deepcopy(document.values)
    paths: set[KeyPath] = set()
    for text in overrides:
        key, separator, raw = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {text!r} must look like key.path=value")
        paths.add(_set(values, key.split("."), parse_value(raw), text))
    return dataclasses.replace(document, values=values, overridden=frozenset(paths))


def _set(values: dict[str, Any], keys: Sequence[str], value: Any, text: str) -> KeyPath:
    """Put a value into nested mappings and lists; return its path, list indices as numbers."""
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
    """Return the list index that a part of an override's key denotes, from 0."""
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(
            f"override {text!r}: {part!r} must be the number of an item, 0 to {len(items) - 1}"
        )
    return int(part)


# Plain values to a section, strictly. Several faults become one message: the first, in one line.

S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Mapping[str, Any], at: KeyPath = ()) -> S:
    """Return `values` as a section whose place in the job is `at`; raise the first fault."""
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


def _explained(
    kind: type[Section], one: Sequence[Mapping[str, Any]], inside: KeyPath, at: KeyPath
) -> str:
    """Put one fault into words.

    `one` has several entries if a setting may have several types: pydantic reports one per type.
    """
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
    """Return the keys and list indices of `loc`, without pydantic's names of union branches."""
    path: list[str | int] = []
    section: type[Section] | None = kind
    for part in loc:
        if isinstance(part, int):  # a list index: the items have the type of the list's section
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


def _dotted(path: KeyPath) -> str:
    """Return `a.b: `, or an empty text for the job itself."""
    return ".".join(map(str, path)) + ": " if path else ""


# YAML with the line of every key, so that an error can say where it is


@dataclass(frozen=True, slots=True)
class Document:
    """Values and where each of them stands."""

    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    file: str | None = None
    overridden: frozenset[KeyPath] = frozenset()
    """Keys that the command line set."""

    def where(self, *paths: KeyPath) -> str:
        """`file:line: ` of a key, or of the nearest one above it; or the command line.

        Of several keys that contradict each other, one that the command line set is to blame.
        """
        found = [self._where(path) for path in paths]
        return _COMMAND_LINE if _COMMAND_LINE in found else found[0]

    def _where(self, path: KeyPath) -> str:
        if path not in self.lines and any(key[: len(path)] == path for key in self.overridden):
            return _COMMAND_LINE
        above = [path[:end] for end in range(len(path), -1, -1)]
        if any(key in self.overridden for key in above):  # whatever the file says below it is gone
            return _COMMAND_LINE
        known = next((self.lines[key] for key in above if key in self.lines), None)
        return f"{self.file}:{known}: " if self.file is not None and known is not None else ""


def read_document(path: Path) -> Document:
    """Read a YAML mapping; any fault in it names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_document(text, str(path))


def parse_document(text: str, file: str) -> Document:
    try:
        values, lines = _parse(text, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{file}{line}: not valid YAML: {problem}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: not a mapping of keys to values")
    return Document(values, lines, file)


def parse_value(text: str) -> Any:
    """The value an override means: `3`, `1e-3`, `true`, `[64, 64]`, `{name: mlp}` or a word."""
    try:
        return _parse(text, "command line")[0]
    except yaml.YAMLError:
        return text


def _parse(text: str, file: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of a YAML text, and the line of every key in it."""
    loader = _Loader(text)
    lines: dict[KeyPath, int] = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {(): 1}  # of an empty file, too, what is missing is told with its name
        _walk(node, (), lines, file)
        return loader.construct_document(node), lines
    except RecursionError:
        raise ConfigError(f"{file}:{loader.line + 1}: nested too deeply") from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: str) -> None:
    """Note the line of every key and refuse what no job is made of."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(path) > _DEEPEST:  # an anchor that contains itself has no end at all
        raise ConfigError(f"{file}:{line}: nested too deeply")
    if len(lines) > _MOST:
        raise ConfigError(f"{file}:{line}: more than {_MOST:,} values: this is no job")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, _key(key, path, lines, file))
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, file)


def _key(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: str) -> str:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{file}:{line}: a key is a word, not a list or a mapping")
    key = str(node.value)
    if (*path, key) in lines:
        raise ConfigError(f"{file}:{line}: key {key!r} is given twice")
    return key


_COMMAND_LINE = "command line: "
_DEEPEST = 50
_MOST = 100_000
"""Nesting and values beyond these are no job, but an accident or an attack by aliases."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number and leaves dates and yes/no as the words they are."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Where Python refuses a value, such as a number of 5,000 digits, say where it stands."""
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                problem=str(error), problem_mark=node.start_mark
            ) from None


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in rules if tag.rsplit(":", 1)[-1] in ("int", "null")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|nan)$"),
    list("-+.0123456789"),
)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF")
)
