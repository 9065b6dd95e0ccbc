"""A recipe held against the columns there are: dependencies, passes, key columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import ConfigError, DataError, KeyPath, unknown
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.steps import WEIGHT, Feature, Step, gaps
from echelon.data.prepare.workdir import Learnt
from echelon.data.shards.encode import check_stored

# --- outline ---
# A recipe held against the columns there are: what depends on what, and whether it all fits.

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


# --- lacking ---
# Steps and features for records that lack columns: nobody knows the label of what is predicted.

Steps = Sequence[tuple[Step, Learnt]]
Features = Sequence[tuple[Feature, Learnt]]
_TARGET = "y"
"""What jobs take for their target, unless they say otherwise."""


class Left(NamedTuple):
    """What can be done without some columns."""

    cleaning: Steps
    features: Features
    raw: set[str]
    """The columns of the records that it is done with."""
    gone: set[str]
    """Those there will not be, of the records or made."""


def left(cleaning: Steps, features: Features, without: Collection[str]) -> Left:
    """What is made of a column that is gone is gone too, and so on to the last feature."""
    gone, made, raw = {*without}, set[str](), set[str]()
    steps = []
    for step, known in cleaning:
        some = step.apart_from(gone)
        gone |= {new for new, old in step.adds().items() if old in gone}
        if some is None or compares(step):  # a new record is none of the set that was compared
            continue
        raw |= {*some.reads()} - made
        made |= {*some.adds()}
        steps.append((some, known))
    encoding = []
    for feature, known in features:
        if gone & {*feature.sources}:
            gone.add(feature.name)
            continue
        raw |= {*feature.sources} - made
        made.add(feature.name)
        encoding.append((feature, known))
    return Left(steps, encoding, raw, gone)


def roots(column: str, cleaning: Steps, features: Features) -> set[str]:
    """The columns of the records that this one is made of in the end."""
    found = {column}
    for feature, _ in reversed(features):
        if feature.name in found:
            found = (found - {feature.name}) | {*feature.sources}
    for step, _ in reversed(cleaning):
        found = {step.adds().get(name, name) for name in found}
    return found


def labels(cleaning: Steps, features: Features) -> set[str]:
    """The columns of the records that targets alone are made of."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for feature, _ in features:
        if not feature.name.startswith("_"):
            target = feature.kind == "classes" or feature.name == _TARGET
            found[target] |= roots(feature.name, cleaning, features)
    return found[True] - found[False]


def refuse_lacking(needed: Collection[str], there: Iterable[str], where: str = "") -> None:
    """One line for records that cannot be encoded, whatever they hold."""
    names = list(there)
    lacking = ", ".join(map(repr, sorted({*needed} - {*names})))
    if lacking:
        raise DataError(
            f"{where}new records must have what the recipe reads: they lack {lacking} "
            f"(their columns: {', '.join(names)})"
        )


# --- segments ---
# Cleaning steps in the stretches that can be done in one go.
#
# A step that has to look at all records first, and one that compares them with each other, ends a
# stretch: those after it wait until everybody is through.


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [start, stop), and what is done at its end."""

    number: int
    start: int
    stop: int
    looks: int | None = None
    """The step after it that has to look first."""
    compares: int | None = None
    """The step after it that compares all records."""
    last: bool = False

    @property
    def stage(self) -> str:
        return f"clean-{self.number}"


def segments(steps: Sequence[Step]) -> list[Segment]:
    """At least one, the last of which leaves what is split and encoded."""
    found: list[Segment] = []
    start = 0
    for at, step in enumerate(steps):
        if step.looks:
            found.append(Segment(len(found), start, at, looks=at))
            start = at
        elif compares(step):
            # What it drops need not be cleaned any more: with no steps left, that is all.
            last = at + 1 == len(steps)
            found.append(Segment(len(found), start, at, compares=at, last=last))
            start = at + 1
    if not found or not found[-1].last:
        found.append(Segment(len(found), start, len(steps), last=True))
    return found


@runtime_checkable
class Comparing(Protocol):
    """A step that compares all records with each other: some are too many."""

    def hashes(self, block: pa.RecordBatch) -> dict[str, Any]:
        """In a worker: a few numbers per row to compare them by."""
        ...

    def duplicates(self, keys: Iterable[Mapping[str, Any]], scratch: Path) -> NDArray[np.int64]:
        """In the parent: for each record −1, or the number of the earlier one it repeats."""
        ...


def compares(step: Step) -> bool:
    return isinstance(step, Comparing)


def comparing(step: Step) -> Comparing:
    assert isinstance(step, Comparing), step.kind
    return step


# --- keys ---
# What a plan has to know of each record: a few bytes for its class, group, time and length.

SPLIT, CLASS, LENGTH = "split", "class", "length"


def key_columns(recipe: Recipe, features: Sequence[Feature]) -> dict[str, str]:
    """Which column says the key that records are split by, and which one their class."""
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
    """Columns without which a record has no place."""
    split, balance = recipe.split, recipe.balance
    found = [split.column] if split is not None and split.column is not None else []
    return found + ([balance.column] if balance is not None else [])


def without_key(block: pa.RecordBatch, names: Sequence[str]) -> list[tuple[int, str]]:
    """Rows that have no value in a column that records are split or balanced by."""
    found: dict[int, str] = {}
    for name in names:
        for row in np.flatnonzero(gaps(block.column(name))).tolist():
            found.setdefault(row, f"column {name!r} has no value: records are divided by it")
    return sorted(found.items())


def keys(
    block: pa.RecordBatch, columns: dict[str, str], by: str | None, texts: Collection[str]
) -> dict[str, Any]:
    """A number per row for each key; `by` is how records are split, `texts` have a length."""
    found: dict[str, Any] = {}
    for key, name in columns.items():
        timed = key == SPLIT and by == "time"
        found[key] = _times(name, block.column(name)) if timed else _words(block.column(name))
    lengths = _lengths(block, texts)
    if lengths is not None:
        found[LENGTH] = lengths
    return found


def _words(column: Any) -> NDArray[np.uint64]:
    """A 64-bit word per value: equal ones for equal values, whatever their block."""
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


def is_key(kind: pa.DataType) -> bool:
    """Whether values of this type have a word: those of lists and structs have none."""
    try:
        _words(pa.array([], kind))
    except pa.ArrowNotImplementedError:
        return False
    return True


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _times(name: str, column: Any) -> NDArray[Any]:
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
    """How long the texts of a row are in all: shards are to get as much work each."""
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
