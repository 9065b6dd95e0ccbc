"""Apply a fitted recipe to new records.

The steps and features of a recipe as they were learnt: how new records become what they became.

They can be written into a single JSON object, so that a model's run needs no folder beside it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare import workdir
from echelon.data.prepare.outline import labels, left, refuse_lacking, roots
from echelon.data.prepare.passes import stays
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.steps import Columns, Feature, Step, Values, take_all
from echelon.data.prepare.workdir import Learnt, pack, unpack
from echelon.data.shards.layout import PREPARED, Manifest, read_description, read_manifest

# --- encoders ---


class Encoded(NamedTuple):
    """New records, encoded."""

    columns: dict[str, Values]
    rows: NDArray[np.int64]
    """Which of the records given each row is."""
    refused: dict[int, str]
    """Which of them have no row, and why."""


@dataclass(frozen=True, slots=True)
class Encoders:
    """What happens to a record between a file and a shard."""

    recipe: Recipe
    cleaning: list[tuple[Step, Learnt]]
    features: list[tuple[Feature, Learnt]]

    def learnt(self, column: str) -> Learnt:
        """What the feature that makes this column has learnt: classes, a vocabulary, …"""
        return self._maker(column)[1]

    def different(self, column: str) -> int | None:
        """How many tokens or categories this column can tell apart, if it holds such."""
        feature, known = self._maker(column)
        return feature.different(known)

    def raw(self) -> set[str]:
        """The columns of the records that steps and features read."""
        return left(self.cleaning, self.features, ()).raw

    def roots(self, column: str) -> set[str]:
        """The columns of the records that this one is made of in the end."""
        return roots(column, self.cleaning, self.features)

    def labels(self) -> set[str]:
        """The columns of the records that targets alone are made of: new ones may lack them."""
        return labels(self.cleaning, self.features)

    def encode(self, batch: pa.RecordBatch, without: Collection[str] = ()) -> Encoded:
        """As the training data was. What needs a column `without` which records may be is left
        out: nobody knows the label of what is to be predicted."""
        cleaning, features, raw, absent = left(self.cleaning, self.features, without)
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
        """What `to_json` made; refuses what is not whole."""
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

    def _maker(self, column: str) -> tuple[Feature, Learnt]:
        for feature, known in reversed(self.features):
            if feature.name == column:
                return feature, known
        made = ", ".join(feature.name for feature, _ in self.features)
        raise DataError(f"no feature makes {column!r} (there are: {made})")


def _text(learnt: Learnt) -> str:
    return base64.b64encode(zlib.compress(pack(learnt))).decode() if learnt else ""


def _known(text: str) -> Learnt:
    return unpack(zlib.decompress(base64.b64decode(text))) if text else {}


# --- prepared ---
# A folder of prepared data: its splits, its counts, and the features as they were learnt.

FILE = PREPARED
FORMAT = "echelon-prepared"
VERSION = 1
LEARNT = "learnt"
QUARANTINE = "quarantine.jsonl"
NOTED = "noted.jsonl"


@dataclass(frozen=True)
class Prepared:
    """What `echelon data prepare` made."""

    folder: Path
    facts: Mapping[str, Any]
    """What prepared.json says."""
    fresh: bool = True
    """Whether it was made just now, and not found to be there already."""

    @property
    def counts(self) -> Mapping[str, Any]:
        """Records read, taken out at each step, and written."""
        found: Mapping[str, Any] = self.facts["counts"]
        return found

    @property
    def splits(self) -> list[str]:
        return list(self.facts["splits"])

    def path(self, split: str) -> Path:
        """The folder of shards of a split."""
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
        """The recipe's steps and features as they were learnt."""
        steps, made = self.recipe.steps(), self.recipe.made()
        return Encoders(
            self.recipe,
            [(step, self._learnt("clean", at)) for at, step in enumerate(steps)],
            [(feature, self._learnt("feature", at)) for at, feature in enumerate(made)],
        )

    def learnt(self, column: str) -> Learnt:
        """What the feature that makes this column has learnt: classes, a vocabulary, …"""
        return self.encoders.learnt(column)

    def encode(
        self, records: Mapping[str, Any] | pa.RecordBatch, without: Collection[str] = ()
    ) -> Encoded:
        """New records as the model knows them: cleaned and encoded as the training data was.

        What needs a label that they lack is left out. Labels are what a column `y` and classes
        alone are made of; others that are not there are named by `without`.
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
    """The prepared data in a folder; refuses what is none."""
    facts = read_description(Path(folder) / FILE, FORMAT, VERSION, "prepared data")
    return Prepared(Path(folder), facts, fresh=False)
