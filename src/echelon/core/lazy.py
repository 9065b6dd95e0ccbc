"""Names of a package that are imported when somebody asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, where: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: `where` has the names that each of its modules gives."""
    modules = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
