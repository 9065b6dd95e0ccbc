"""Recipes: their settings, reading them from a file or a mapping, and the kinds they can name.

A recipe is checked as a whole when it is read: every setting, every row of `clean` and `features`.
Whether it fits the columns of the inputs is checked later, by outline.py.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from echelon.core.config.loading import Document, checked, overridden, read_document
from echelon.core.config.sections import Contradiction, Section, SettingError
from echelon.core.errors import ConfigError, KeyPath, unknown
from echelon.data.formats.records import Input
from echelon.data.prepare.ranking import SPLITS
from echelon.data.prepare.steps import Feature, Step, chosen

Kinds = tuple[dict[str, Any], ...]


class Split(Section):
    """How records are divided among train, valid and test."""

    by: Literal["ratio", "stratified", "group", "time"] = "ratio"
    column: str | None = None
    """The column with the class, group or time of a record."""
    train: Annotated[float, Field(ge=0)] | None = None
    valid: Annotated[float, Field(ge=0)] | None = None
    test: Annotated[float, Field(ge=0)] | None = None
    folds: Annotated[int, Field(ge=2)] | None = None
    """Cross-validation: the number of folds. One fold is the test, the others are for training."""
    fold: Annotated[int, Field(ge=0)] | None = None
    """The fold that is the test, from 0."""

    @model_validator(mode="after")
    def _folded(self) -> Self:
        if (self.folds is None) != (self.fold is None):
            raise SettingError(
                "cross-validation needs both: split.folds says how many, split.fold which one is "
                "the test",
                "folds" if self.fold is None else "fold",
            )
        if self.folds is not None and self.fold is not None:
            self._check_fold(self.folds, self.fold)
        return self

    def _check_fold(self, folds: int, fold: int) -> None:
        if fold >= folds:
            raise SettingError(
                f"split.fold = {fold}: {folds} folds are counted from 0 to {folds - 1}", "fold"
            )
        if self.by == "time":
            raise SettingError(
                "split.folds does not go with by: time: later records would be trained on", "folds"
            )
        for name in ("train", "test"):
            if getattr(self, name) is not None:
                raise SettingError(
                    f"split.folds says how many are for training and test: take out split.{name}",
                    name,
                )
        if (self.valid or 0.0) >= 1 - 1 / folds - 1e-9:
            raise SettingError(
                f"split.valid = {self.valid:g} and a fold of 1/{folds} leave nothing to train on",
                "valid",
            )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.column is None) != (self.by == "ratio"):
            needs = "needs a column" if self.by != "ratio" else "takes no column"
            raise SettingError(f"split.by = {self.by!r} {needs}", "column")
        if abs(sum(self.shares) - 1) > 1e-6:
            said = ", ".join(f"{share:g}" for share in self.shares)
            raise SettingError(
                f"shares of train, valid and test are {said}: they must add up to 1", "train"
            )
        return self

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of train, valid and test. If some are set, the others are 0.

        With folds: shares of the records outside the fold.
        """
        if self.folds is not None:
            valid = (self.valid or 0.0) / (1 - 1 / self.folds)
            return 1 - valid, valid, 0.0
        said = (self.train, self.valid, self.test)
        if said == (None, None, None):
            return _SHARES
        train, valid, test = (share or 0.0 for share in said)
        return train, valid, test


_SHARES = (0.8, 0.1, 0.1)


class Balance(Section):
    """Makes rare classes count as much as frequent ones."""

    column: str
    how: Literal["weight", "resample"] = "weight"
    at_most: Annotated[int, Field(ge=1)] | None = None
    """The most often that a record is written."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.at_most is not None and self.how == "weight":
            raise SettingError("balance.at_most is for how: resample", "at_most")
        return self


class Write(Section):
    """The output folder, and how many shards each split has."""

    folder: Annotated[str, Field(min_length=1)]
    shards: Annotated[int, Field(ge=1)] | None = None
    rows: Annotated[int, Field(ge=1)] | None = None
    """The most records in a shard."""

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        # The folder is replaced as a whole, and the work folder beside it is named after it.
        if "\0" in self.folder or Path(self.folder).name in ("", ".."):
            raise SettingError(
                f"write.folder = {self.folder!r}: it must end with the name of a folder of its "
                f"own, such as prepared, and hold no NUL",
                "folder",
            )
        return self

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.shards is not None and self.rows is not None:
            raise SettingError("say write.shards or write.rows, not both", "shards", "rows")
        return self


class Recipe(Section):
    """Everything that `prepare` is given: from raw files to shards."""

    read: tuple[Input, ...]
    bad: Literal["quarantine", "refuse"] = "quarantine"
    """Whether records that cannot be read go to the quarantine, or end the preparation."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column → type. A value that does not fit makes its record bad. Others are inferred."""
    clean: Kinds = ()
    split: Split | None = None
    balance: Balance | None = None
    features: Kinds = ()
    keep: tuple[str, ...] = ()
    """Columns that are written unchanged."""
    write: Write
    seed: int = 0

    def steps(self) -> list[Step]:
        """Return the rows of `clean` as steps."""
        return [
            checked(step_kind(_kind(values, "clean", at)), values, ("clean", at))
            for at, values in enumerate(self.clean)
        ]

    def made(self) -> list[Feature]:
        """Return the rows of `features`; kinds with a `seed` get the recipe's by default."""
        found: list[Feature] = []
        for at, values in enumerate(self.features):
            kind = feature_kind(_kind(values, "features", at))
            seeded = {"seed": self.seed} if "seed" in kind.model_fields else {}
            found.append(checked(kind, seeded | values, ("features", at)))
        return found

    def anchored(self, folder: Path) -> Recipe:
        """Return the recipe with input paths that exist below `folder` resolved against it."""
        read = [one.model_copy(update={"path": _anchored(one.path, folder)}) for one in self.read]
        return self.model_copy(update={"read": tuple(read)})

    def values(self) -> dict[str, Any]:
        """Return the settings as written, in plain values; `recipe_from` is the inverse."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _anchored(path: str, folder: Path) -> str:
    """Resolve a path against `folder` if it exists there; of `zip://a::b.zip` the part `b.zip`."""
    inner, chained, last = path.rpartition("::") if "://" in path else ("", "", path)
    beside = str(folder / last)
    if "://" in last or not any(glob.iglob(beside)):  # noqa: PTH207 (roots)
        return path
    return f"{inner}{chained}{beside}"


def _kind(values: Mapping[str, Any], where: str, at: int) -> str:
    kind = values.get("kind")
    if not isinstance(kind, str):
        raise ConfigError("it must say its kind", (where, at))
    return kind


# Reading a recipe


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe and the document it was read from."""

    recipe: Recipe
    document: Document = dataclasses.field(default_factory=lambda: Document({}))

    def where(self, path: KeyPath) -> str:
        """Return `file:line: ` of a setting."""
        return self.document.where(path)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RecipeFile:
    """Read a recipe, apply overrides and check it; errors name file and line.

    Input paths are looked up beside the recipe first, then in the current folder.
    """
    document = overridden(read_document(path), overrides)
    return RecipeFile(_built(document).anchored(path.parent), document)


def recipe_from(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of plain values, checked like a file."""
    return _built(Document(dict(values)))


def _built(document: Document) -> Recipe:
    try:
        recipe = checked(Recipe, _listed(document.values))
        _checked_kinds(recipe)
    except ConfigError as error:
        about = error.paths if isinstance(error, Contradiction) else (error.path,)
        raise ConfigError(document.where(*about) + error.message, error.path) from None
    return recipe


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize `read` to a list of inputs: it may be a single one, and an input may be a path."""
    read = values.get("read")
    if not isinstance(read, str | dict | list):
        return dict(values)
    items = read if isinstance(read, list) else [read]
    return {**values, "read": [{"path": i} if isinstance(i, str) else i for i in items]}


def _checked_kinds(recipe: Recipe) -> None:
    if not recipe.read:
        raise ConfigError("read: a recipe reads at least one input", ("read",))
    for at, one in enumerate(recipe.read):
        if one.split is not None and one.split not in SPLITS:
            raise ConfigError(
                f"read.{at}: {unknown('split', one.split, SPLITS)}", ("read", at, "split")
            )
        if one.split == "test" and recipe.split is not None and recipe.split.folds is not None:
            raise ConfigError(
                f"read.{at}: with split.folds the test is a fold, and no input can be for it",
                ("read", at, "split"),
            )
    for where, check, rows in (
        ("clean", step_kind, recipe.clean),
        ("features", feature_kind, recipe.features),
    ):
        for at, values in enumerate(rows):
            path: KeyPath = (where, at, "kind")
            try:
                check(_kind(values, where, at))
            except ConfigError as error:
                raise ConfigError(f"{where}.{at}: {error.message}", path) from None
    recipe.steps()
    recipe.made()
    if not recipe.features and not recipe.keep:
        raise ConfigError("nothing would be written: name features or columns to keep", ())


# The kinds of cleaning steps and features, imported when a recipe names them


_CLEAN = "echelon.data.prepare.clean"
STEPS: Mapping[str, str] = {
    "text": f"{_CLEAN}.values:Text",
    "length": f"{_CLEAN}.values:Length",
    "missing": f"{_CLEAN}.values:Missing",
    "range": f"{_CLEAN}.values:Range",
    "types": f"{_CLEAN}.values:Types",
    "duplicates": f"{_CLEAN}.duplicates:Duplicates",
    "noise": f"{_CLEAN}.label_noise:Noise",
}
"""Kind → `module:Class`."""


def step_kind(kind: str) -> type[Step]:
    """Return the class of a kind of cleaning step."""
    found: type[Step] = chosen("kind of cleaning", kind, STEPS)
    return found


_FEATURES = "echelon.data.prepare.features"
_TEXT = "echelon.data.prepare.text"
FEATURES: Mapping[str, str] = {
    "classes": f"{_FEATURES}.categories:Classes",
    "standardise": f"{_FEATURES}.numbers:Standardise",
    "min_max": f"{_FEATURES}.numbers:MinMax",
    "bins": f"{_FEATURES}.numbers:Bins",
    "one_hot": f"{_FEATURES}.categories:OneHot",
    "hashed": f"{_FEATURES}.categories:Hashed",
    "target": f"{_FEATURES}.supervised:Target",
    "cross": f"{_FEATURES}.categories:Cross",
    "join": f"{_FEATURES}.join:Join",
    "sparse": f"{_FEATURES}.join:SparseRows",
    "pca": f"{_FEATURES}.projection:PCA",
    "svd": f"{_FEATURES}.projection:SVD",
    "select": f"{_FEATURES}.supervised:Select",
    "image": f"{_FEATURES}.images:Image",
    "tokens": f"{_TEXT}.encode:TokenIds",
    "one_hot_text": f"{_TEXT}.encode:OneHotText",
    "bag": f"{_TEXT}.encode:Bag",
    "tfidf": f"{_TEXT}.encode:Tfidf",
    "hashed_text": f"{_TEXT}.encode:HashedText",
    "word2vec": f"{_TEXT}.embeddings:Word2Vec",
    "sentences": f"{_TEXT}.embeddings:Sentences",
}
"""Kind → `module:Class`."""


def feature_kind(kind: str) -> type[Feature]:
    """Return the class of a kind of feature."""
    found: type[Feature] = chosen("kind of feature", kind, FEATURES)
    return found
