"""Kinds of steps and features: named in a recipe, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from echelon.core.errors import ConfigError, unknown


def chosen(what: str, kind: str, kinds: Mapping[str, str]) -> Any:
    """The class behind a kind; `kinds` says where each is, as `module:Class`."""
    if kind not in kinds:
        raise ConfigError(unknown(what, kind, kinds), ("kind",))
    module, _, name = kinds[kind].partition(":")
    return getattr(importlib.import_module(module), name)
