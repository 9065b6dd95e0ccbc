"""A recipe held against the columns there are: what depends on what, and whether it all fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from echelon.core.errors import ConfigError, DataError, KeyPath, unknown
from echelon.data.prepare.columns import WEIGHT
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.keys import is_key, is_text, key_columns
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.step import Step
from echelon.data.shards.encode_arrow import check_stored

T = TypeVar("T")


class Outline:
    """Made before any work is done; refuses what cannot be done."""

    def __init__(
        self, recipe: Recipe, schema: pa.Schema, steps: Sequence[Step], features: Sequence[Feature]
    ) -> None:
        self._recipe = recipe
        self._features = features
        names = {field.name: field.type for field in schema}
        for at, step in enumerate(steps):
            names = _at(("clean", at), partial(step.check, names))
        self.raw = dict(names)
        """Columns after cleaning."""
        self._check_columns()
        self._check_kept(schema)
        self.parents = self._dependencies(names)
        """For each feature those whose columns it reads."""
        self.keys = key_columns(recipe, [one for one in features if one.sources[0] in self.raw])
        self.texts = {name for one in features if one.by_length for name in one.sources}
        self.texts |= set(recipe.keep)
        """Columns whose texts make a record long, if they hold any."""
        self.wanted = {name for one in features for name in one.reads()} | set(recipe.keep)
        """Columns that anybody reads after cleaning, made or raw."""
        self.categories = self._categories()
        """Texts of which only matters which of them are the same."""

    @property
    def written(self) -> list[str]:
        """The columns of shards that features make, in order."""
        found: dict[str, None] = {}
        for made in self._made:
            found |= dict.fromkeys(name for name in made if not name.startswith("_"))
        return list(found)

    def ancestors(self, targets: set[int]) -> set[int]:
        """The features that have to be encoded for these to see their columns."""
        found: set[int] = set()
        rest = list(targets)
        while rest:
            more = self.parents[rest.pop()] - found
            found |= more
            rest += more
        return found

    def _check_columns(self) -> None:
        split, balance = self._recipe.split, self._recipe.balance
        if split is not None and split.column is not None:
            self._known("split", split.column, ("split", "column"))
            if split.by != "time":
                self._is_key("split", split.column)
        if balance is not None:
            self._known("balance", balance.column, ("balance", "column"))
            self._is_key("balance", balance.column)
        for at, name in enumerate(self._recipe.keep):
            self._known("keep", name, ("keep", at))
            self._refuse_weight("keep", name, ("keep", at))

    def _check_kept(self, schema: pa.Schema) -> None:
        """Columns that are kept go to shards as they are: what cannot lie there is refused now."""
        for at, name in enumerate(self._recipe.keep):
            said = schema.field(name).metadata if name in schema.names else None
            try:
                check_stored(pa.field(name, self.raw[name], metadata=said))
            except DataError as error:
                raise ConfigError(f"keep: {error}", ("keep", at)) from None

    def _categories(self) -> set[str]:
        texts = {name for name, kind in self.raw.items() if is_text(kind)}
        texts &= {name for one in self._features if one.by_category for name in one.sources}
        for one in self._features:
            texts -= set(one.reads()) - set(one.sources if one.by_category else ())
        return texts - set(self._recipe.keep) - set(self.keys.values())

    def _known(self, where: str, name: str, path: KeyPath) -> None:
        if name not in self.raw:
            raise ConfigError(f"{where}: {unknown('column', name, self.raw)}", path)

    def _is_key(self, where: str, name: str) -> None:
        kind = self.raw[name]
        if not is_key(kind):
            raise ConfigError(
                f"{where}: column {name!r} is of type {kind}: records are divided by "
                f"texts, numbers, truths or times",
                (where, "column"),
            )

    def _refuse_weight(self, where: str, name: str, path: KeyPath) -> None:
        balance = self._recipe.balance
        if name == WEIGHT and balance is not None and balance.how == "weight":
            raise ConfigError(
                f"{where}: balance writes a column {name!r} of its own: call this one otherwise, "
                f"or take out balance",
                path,
            )

    def _dependencies(self, names: dict[str, pa.DataType]) -> list[set[int]]:
        maker: dict[str, int] = {}
        parents: list[set[int]] = []
        self._made: list[list[str]] = []
        for at, feature in enumerate(self._features):
            _at(("features", at), partial(feature.check, names))
            parents.append({maker[name] for name in feature.reads() if name in maker})
            made = feature.makes(names)
            for name in made:
                if name in maker and name not in feature.reads():
                    raise ConfigError(
                        f"features.{at}: column {name!r} is made by features.{maker[name]} already",
                        ("features", at),
                    )
                if name in self._recipe.keep:
                    raise ConfigError(
                        f"features.{at}: column {name!r} is to be kept as it is; say another `to`",
                        ("features", at),
                    )
                self._refuse_weight(f"features.{at}", name, ("features", at))
            names |= made
            maker |= dict.fromkeys(made, at)
            self._made.append(list(made))
        return parents


def _at(path: KeyPath, check: Callable[[], T]) -> T:
    """A fault found by this check stands at this place of the recipe."""
    try:
        return check()
    except ConfigError as error:
        raise ConfigError(error.message, (*path, *error.path)) from None
    except DataError as error:
        raise ConfigError(str(error), path) from None
