"""Prepared data, and applying a fitted recipe to new records.

`Prepared` is the folder that `prepare()` made. Its `encoders` are the recipe's cleaning steps and
features with what they have learnt; they clean and encode new records as the training data was. A
run keeps them as one JSON object (`Encoders.to_json`), so it does not need the folder any more.

New records may lack columns: the label of a record to predict is not known. Steps and features that
need such a column are left out, and so is everything that is made of it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare import workdir
from echelon.data.prepare.outline import compares
from echelon.data.prepare.passes import stays
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.steps import Columns, Feature, Step, Values, take_all
from echelon.data.prepare.workdir import Learnt, pack, unpack
from echelon.data.shards.layout import PREPARED, Manifest, read_description, read_manifest


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data: shards of each split, counts, and the fitted recipe."""

    folder: Path
    facts: Mapping[str, Any]
    """The content of prepared.json."""
    fresh: bool = True
    """Whether this call of `prepare` made it; False if it existed already."""

    @property
    def counts(self) -> Mapping[str, Any]:
        """Records read, taken out at each step, and written."""
        found: Mapping[str, Any] = self.facts["counts"]
        return found

    @property
    def splits(self) -> list[str]:
        return list(self.facts["splits"])

    def path(self, split: str) -> Path:
        """Return the folder with the shards of a split."""
        if split not in self.splits:
            raise DataError(f"{self.folder}: has no split {split!r} ({', '.join(self.splits)})")
        return self.folder / split

    def manifest(self, split: str) -> Manifest:
        return read_manifest(self.path(split))

    @cached_property
    def recipe(self) -> Recipe:
        write = {"folder": self.folder.resolve().name}
        return Recipe.model_validate(self.facts["recipe"] | {"write": write})

    @cached_property
    def encoders(self) -> Encoders:
        """The recipe's steps and features with what they have learnt."""
        steps, made = self.recipe.steps(), self.recipe.made()
        return Encoders(
            self.recipe,
            [(step, self._learnt("clean", at)) for at, step in enumerate(steps)],
            [(feature, self._learnt("feature", at)) for at, feature in enumerate(made)],
        )

    def learnt(self, column: str) -> Learnt:
        """Return what the feature that makes this column has learnt: classes, a vocabulary, …"""
        return self.encoders.learnt(column)

    def encode(
        self, records: Mapping[str, Any] | pa.RecordBatch, without: Collection[str] = ()
    ) -> Encoded:
        """Clean and encode new records as the training data was.

        Columns that need a label are left out if the records lack it. Labels are the raw columns
        that only classes and a column `y` are made of; name other absent columns in `without`.
        """
        batch = records if isinstance(records, pa.RecordBatch) else pa.record_batch(dict(records))
        absent = {*without, *self.encoders.labels()} - {*batch.schema.names}
        found = self.encoders.encode(batch, absent)
        names = [field.name for field in self.manifest(self.splits[0]).schema]
        return found._replace(
            columns={name: found.columns[name] for name in names if name in found.columns}
        )

    def _learnt(self, what: str, at: int) -> Learnt:
        folder = self.folder / LEARNT / f"{what}-{at}"
        return workdir.load(folder) if folder.exists() else {}


def open_prepared(folder: str | Path) -> Prepared:
    """Open a folder of prepared data; raise DataError if it is something else."""
    facts = read_description(Path(folder) / PREPARED, FORMAT, VERSION, "prepared data")
    return Prepared(Path(folder), facts, fresh=False)


FORMAT = "echelon-prepared"
VERSION = 1
LEARNT = "learnt"
QUARANTINE = "quarantine.jsonl"
NOTED = "noted.jsonl"


@dataclass(frozen=True, slots=True)
class Encoders:
    """The fitted steps and features of a recipe: everything between a file and a shard."""

    recipe: Recipe
    cleaning: list[tuple[Step, Learnt]]
    features: list[tuple[Feature, Learnt]]

    def learnt(self, column: str) -> Learnt:
        """Return what the feature that makes this column has learnt: classes, a vocabulary, …"""
        return self._maker(column)[1]

    def different(self, column: str) -> int | None:
        """Return how many tokens or categories this column distinguishes, if it holds such."""
        feature, known = self._maker(column)
        return feature.different(known)

    def raw(self) -> set[str]:
        """Return the raw columns that steps and features read."""
        return self._applicable(()).raw

    def roots(self, column: str) -> set[str]:
        """Return the raw columns that this one is made of, directly or indirectly."""
        found = {column}
        for feature, _ in reversed(self.features):
            if feature.name in found:
                found = (found - {feature.name}) | {*feature.sources}
        for step, _ in reversed(self.cleaning):
            found = {step.adds().get(name, name) for name in found}
        return found

    def labels(self) -> set[str]:
        """Return the raw columns that only targets are made of; new records may lack them."""
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for feature, _ in self.features:
            if not feature.name.startswith("_"):
                target = feature.kind == "classes" or feature.name == _TARGET
                found[target] |= self.roots(feature.name)
        return found[True] - found[False]

    def encode(self, batch: pa.RecordBatch, without: Collection[str] = ()) -> Encoded:
        """Clean and encode records. Raw columns in `without` are absent: skip what needs them."""
        cleaning, features, raw, absent = self._applicable(without)
        refuse_lacking(raw, batch.schema.names)
        rows = np.arange(batch.num_rows)
        refused: dict[int, str] = {}
        for step, known in cleaning:
            done = step.clean(batch, known)
            refused |= {int(rows[row]): reason for row, reason in done.dropped}
            rows = np.delete(rows, [row for row, _ in done.dropped])
            batch = done.block
        columns: Columns = {name: batch.column(name) for name in batch.schema.names}
        for feature, known in features:
            gone = feature.refused(columns, known)
            if gone:
                refused |= {int(rows[row]): reason for row, reason in gone.items()}
                stay = stays(columns, gone)
                rows, columns = rows[stay], take_all(columns, stay)
            columns = {**columns, **feature.encode(columns, known)}
        found = {name: values for name, values in columns.items() if name not in absent}
        return Encoded(found, rows, refused)

    def to_json(self) -> dict[str, Any]:
        said = self.recipe.values()
        kept = {key: said[key] for key in ("clean", "features", "seed") if key in said}
        learnt = {
            "clean": [_text(known) for _, known in self.cleaning],
            "features": [_text(known) for _, known in self.features],
        }
        return {"recipe": kept, "learnt": learnt}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Encoders:
        """Return the encoders that `to_json` made; raise DataError if they are incomplete."""
        try:
            nowhere = {"read": [{"path": "."}], "write": {"folder": "nowhere"}}
            recipe = Recipe.model_validate({**nowhere, **plain["recipe"]})
            cleaning = map(_known, plain["learnt"]["clean"])
            features = map(_known, plain["learnt"]["features"])
            return cls(
                recipe,
                list(zip(recipe.steps(), cleaning, strict=True)),
                list(zip(recipe.made(), features, strict=True)),
            )
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"what was learnt from the data cannot be read: {error}") from None

    def _applicable(self, without: Collection[str]) -> _Applicable:
        """Return the steps and features that can run without some raw columns.

        What is made of an absent column is absent too, and so on to the last feature.
        """
        gone, made, raw = {*without}, set[str](), set[str]()
        cleaning = []
        for step, known in self.cleaning:
            some = step.apart_from(gone)
            gone |= {new for new, old in step.adds().items() if old in gone}
            if some is None or compares(step):  # a new record has no other records to repeat
                continue
            raw |= {*some.reads()} - made
            made |= {*some.adds()}
            cleaning.append((some, known))
        features = []
        for feature, known in self.features:
            if gone & {*feature.sources}:
                gone.add(feature.name)
                continue
            raw |= {*feature.sources} - made
            made.add(feature.name)
            features.append((feature, known))
        return _Applicable(cleaning, features, raw, gone)

    def _maker(self, column: str) -> tuple[Feature, Learnt]:
        for feature, known in reversed(self.features):
            if feature.name == column:
                return feature, known
        made = ", ".join(feature.name for feature, _ in self.features)
        raise DataError(f"no feature makes {column!r} (there are: {made})")


class Encoded(NamedTuple):
    """Encoded records."""

    columns: dict[str, Values]
    rows: NDArray[np.int64]
    """For each row, the index of the record it was made of."""
    refused: dict[int, str]
    """Records without a row → the reason."""


class _Applicable(NamedTuple):
    """The steps and features that can run without some columns."""

    cleaning: list[tuple[Step, Learnt]]
    features: list[tuple[Feature, Learnt]]
    raw: set[str]
    """The raw columns that they read."""
    gone: set[str]
    """The columns that are absent, raw or made."""


_TARGET = "y"
"""The column that jobs take for their target by default."""


def _text(learnt: Learnt) -> str:
    return base64.b64encode(zlib.compress(pack(learnt))).decode() if learnt else ""


def _known(text: str) -> Learnt:
    return unpack(zlib.decompress(base64.b64decode(text))) if text else {}


def refuse_lacking(needed: Collection[str], there: Iterable[str], where: str = "") -> None:
    """Raise DataError if columns that are needed to encode records are not there."""
    names = list(there)
    lacking = ", ".join(map(repr, sorted({*needed} - {*names})))
    if lacking:
        raise DataError(
            f"{where}new records must have what the recipe reads: they lack {lacking} "
            f"(their columns: {', '.join(names)})"
        )
