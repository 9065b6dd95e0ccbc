"""From raw files to shards: read, clean, split, make features, write.

Nothing is imported before it is used: a worker sets itself up before numpy is there, and no part
needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.process import lazily

if TYPE_CHECKING:
    from echelon.data.prepare.prepared import Prepared, open_prepared
    from echelon.data.prepare.preparing import prepare
    from echelon.data.prepare.recipe import Recipe, load_recipe, recipe_from

__all__ = ["Prepared", "Recipe", "load_recipe", "open_prepared", "prepare", "recipe_from"]

__getattr__ = lazily(
    __name__,
    {
        "prepared": ("Prepared", "open_prepared"),
        "preparing": ("prepare",),
        "recipe": ("Recipe", "load_recipe", "recipe_from"),
    },
)
