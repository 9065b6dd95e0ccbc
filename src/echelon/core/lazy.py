"""Imports on first use. Nothing else is imported here: `import echelon` has to be quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, where: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports a name when it is first used.

    `where` maps each module of the package to the names that it provides.
    """
    modules = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
