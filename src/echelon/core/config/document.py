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


_COMMAND_LINE = "command line: "
_DEEPEST = 50
_MOST = 100_000
"""Nesting and values beyond these are no job, but an accident or an attack by aliases."""


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


def parse_value(text: str) -> Any:
    """The value an override means: `3`, `1e-3`, `true`, `[64, 64]`, `{name: mlp}` or a word."""
    try:
        return _parse(text, "command line")[0]
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
