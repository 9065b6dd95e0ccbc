"""From raw files to shards: read, clean, split, make features, write.

Nothing is imported before it is used: a worker sets itself up before numpy is there, and no part
needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.data.prepare.prepared import Prepared, open_prepared
    from echelon.data.prepare.preparing import prepare
    from echelon.data.prepare.recipe import Recipe, load_recipe, recipe_from

__all__ = ["Prepared", "Recipe", "load_recipe", "open_prepared", "prepare", "recipe_from"]

_WHERE = {
    "Prepared": "prepared",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "open_prepared": "prepared",
    "prepare": "preparing",
    "recipe_from": "recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
