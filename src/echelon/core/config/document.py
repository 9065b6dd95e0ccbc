"""YAML with the line of every key, so that an error can say where it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from echelon.core.errors import ConfigError, KeyPath


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number and leaves dates and yes/no as the words they are."""


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


@dataclass(frozen=True, slots=True)
class Document:
    """Values and where each of them stands."""

    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    file: str | None = None
    overridden: frozenset[KeyPath] = frozenset()
    """Keys that the command line set."""

    def where(self, path: KeyPath) -> str:
        """`file:line: ` of this key, or of the nearest one above it; or the command line."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.overridden:
                return "command line: "
            if self.file is not None and path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}: "
        return ""


def parse_value(text: str) -> Any:
    """The value an override means: `3`, `1e-3`, `true`, `[64, 64]`, `{name: mlp}` or a word."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


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
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, file)
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{file}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: a job is a mapping of keys to values")
    return Document(values, lines, file)


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: str) -> None:
    """Note the line of every key and refuse a key that is given twice."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{file}:{line}: key {key.value!r} is given twice")
            seen.add(key.value)
            lines[(*path, key.value)] = line
            _walk(value, (*path, key.value), lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, file)
