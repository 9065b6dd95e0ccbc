"""A recipe checked against the columns of its inputs, before any work is done.

Outline    which columns there are after cleaning, which feature depends on which, and what
           later passes need; refuses a recipe that does not fit
segments   groups the cleaning steps into passes
keys       the few bytes of each record that the plan needs: class, group, time, length
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import ConfigError, DataError, KeyPath, unknown
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.steps import WEIGHT, Feature, Step, gaps, is_text
from echelon.data.shards.encode import check_stored


class Outline:
    """The columns and dependencies of a recipe. The constructor refuses what cannot be done."""

    def __init__(
        self, recipe: Recipe, schema: pa.Schema, steps: Sequence[Step], features: Sequence[Feature]
    ) -> None:
        self._recipe = recipe
        self._features = features
        names = {field.name: field.type for field in schema}
        for at, step in enumerate(steps):
            names = _at(("clean", at), partial(step.check, names))
        self.raw = dict(names)
        """Columns after cleaning, and their types."""
        self._check_columns()
        self._check_kept(schema)
        self.parents = self._dependencies(names)
        """For each feature, the features whose columns it reads."""
        self.keys = key_columns(recipe, [one for one in features if one.sources[0] in self.raw])
        self.texts = {name for one in features if one.by_length for name in one.sources}
        self.texts |= set(recipe.keep)
        """Columns whose texts, if they hold any, count for the length of a record."""
        self.wanted = {name for one in features for name in one.reads()} | set(recipe.keep)
        """Columns, raw or made, that are read after cleaning."""
        self.categories = self._categories()
        """Text columns that serve as categories only, so they can be dictionary-encoded."""

    @property
    def written(self) -> list[str]:
        """The columns of shards that features make, in order; names with `_` are intermediate."""
        found: dict[str, None] = {}
        for made in self._made:
            found |= dict.fromkeys(name for name in made if not name.startswith("_"))
        return list(found)

    def ancestors(self, targets: set[int]) -> set[int]:
        """Return the features that must be encoded before the targets, directly or indirectly."""
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
        """Refuse kept columns of types that shards cannot store."""
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


T = TypeVar("T")


def _at(path: KeyPath, check: Callable[[], T]) -> T:
    """Run a check; attach the place in the recipe to the error it raises."""
    try:
        return check()
    except ConfigError as error:
        raise ConfigError(error.message, (*path, *error.path)) from None
    except DataError as error:
        raise ConfigError(str(error), path) from None


# Segments: the cleaning steps that run in one pass


@dataclass(frozen=True, slots=True)
class Segment:
    """Cleaning steps [start, stop), and what happens at their end.

    A step that must look at all records before it can clean, or compares them with one another,
    ends a segment: the steps from there on wait until every block is through.
    """

    number: int
    start: int
    stop: int
    looks: int | None = None
    """The step after the segment that must look at all records first."""
    compares: int | None = None
    """The step after the segment that compares all records."""
    last: bool = False

    @property
    def stage(self) -> str:
        return f"clean-{self.number}"


def segments(steps: Sequence[Step]) -> list[Segment]:
    """Return the segments, at least one. The last one leaves the records to split and encode."""
    found: list[Segment] = []
    start = 0
    for at, step in enumerate(steps):
        if step.looks:
            found.append(Segment(len(found), start, at, looks=at))
            start = at
        elif compares(step):
            # If no step follows, this is the last segment: the plan leaves out the duplicates.
            last = at + 1 == len(steps)
            found.append(Segment(len(found), start, at, compares=at, last=last))
            start = at + 1
    if not found or not found[-1].last:
        found.append(Segment(len(found), start, len(steps), last=True))
    return found


@runtime_checkable
class Comparing(Protocol):
    """A cleaning step that compares all records with one another to find duplicates."""

    def hashes(self, block: pa.RecordBatch) -> dict[str, Any]:
        """Return a few numbers per row to compare records by. Runs in a worker."""
        ...

    def duplicates(self, keys: Iterable[Mapping[str, Any]], scratch: Path) -> NDArray[np.int64]:
        """Return for each record the number of the earlier one it repeats, or −1.

        Runs in the parent; `keys` are the results of `hashes`, in block order.
        """
        ...


def compares(step: Step) -> bool:
    return isinstance(step, Comparing)


def comparing(step: Step) -> Comparing:
    assert isinstance(step, Comparing), step.kind
    return step


# Keys: what the plan has to know of each record


SPLIT, CLASS, LENGTH = "split", "class", "length"


def key_columns(recipe: Recipe, features: Sequence[Feature]) -> dict[str, str]:
    """Return the columns that hold the key to split by and the class, by SPLIT and CLASS.

    The class is that of `balance`, else of a stratified split, else of the first `classes` feature.
    """
    found: dict[str, str] = {}
    split, balance = recipe.split, recipe.balance
    if split is not None and split.column is not None:
        found[SPLIT] = split.column
    stratified = split.column if split is not None and split.by == "stratified" else None
    classes = [one.sources[0] for one in features if one.kind == "classes"]
    of_class = balance.column if balance is not None else stratified
    if of_class is None and classes:
        of_class = classes[0]
    if of_class is not None:
        found[CLASS] = of_class
    return found


def required(recipe: Recipe) -> list[str]:
    """Return the columns in which every record needs a value to be split and balanced."""
    split, balance = recipe.split, recipe.balance
    found = [split.column] if split is not None and split.column is not None else []
    return found + ([balance.column] if balance is not None else [])


def without_key(block: pa.RecordBatch, names: Sequence[str]) -> list[tuple[int, str]]:
    """Return the rows without a value in one of these columns, and why they are taken out."""
    found: dict[int, str] = {}
    for name in names:
        for row in np.flatnonzero(gaps(block.column(name))).tolist():
            found.setdefault(row, f"column {name!r} has no value: records are divided by it")
    return sorted(found.items())


def keys(
    block: pa.RecordBatch, columns: dict[str, str], by: str | None, texts: Collection[str]
) -> dict[str, Any]:
    """Return each key as a number per row; `texts` are the columns whose lengths add up."""
    found: dict[str, Any] = {}
    for key, name in columns.items():
        timed = key == SPLIT and by == "time"
        found[key] = _times(name, block.column(name)) if timed else _words(block.column(name))
    lengths = _lengths(block, texts)
    if lengths is not None:
        found[LENGTH] = lengths
    return found


def is_key(kind: pa.DataType) -> bool:
    """Return whether values of this type can be hashed; lists and structs cannot."""
    try:
        _words(pa.array([], kind))
    except pa.ArrowNotImplementedError:
        return False
    return True


def _words(column: Any) -> NDArray[np.uint64]:
    """Return a 64-bit hash per value, the same for equal values in all blocks."""
    coded = column.dictionary_encode()
    kinds = _bytes(coded.dictionary).to_pylist()
    table = np.zeros(len(kinds) + 1, np.uint64)
    for at, kind in enumerate(kinds):
        digest = hashlib.blake2b(kind, digest_size=8).digest()
        table[at] = int.from_bytes(digest, "little")
    at = coded.indices.fill_null(len(kinds)).to_numpy(zero_copy_only=False)
    return np.asarray(table[at])


def _bytes(values: Any) -> Any:
    raw = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    return (values if raw else values.cast(pa.large_utf8())).cast(pa.large_binary())


def _times(name: str, column: Any) -> NDArray[Any]:
    """Return numbers in the order of the times."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    try:
        stamps = column.cast(pa.timestamp("us")) if not pa.types.is_timestamp(kind) else column
        return np.asarray(stamps.cast(pa.int64()).to_numpy(zero_copy_only=False))
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise DataError(f"split by time: column {name!r} holds no times: {line}") from None


def _lengths(block: pa.RecordBatch, texts: Collection[str]) -> NDArray[np.int32] | None:
    """Return the total bytes of the texts of each row, by which the work of shards is balanced."""
    columns = [
        block.column(field.name)
        for field in block.schema
        if field.name in texts and is_text(field.type)
    ]
    if not columns:
        return None
    total = np.zeros(block.num_rows, np.int64)
    for text in columns:
        total += pc.binary_length(text).fill_null(0).to_numpy(zero_copy_only=False)
    return np.minimum(total, np.iinfo(np.int32).max).astype(np.int32)
