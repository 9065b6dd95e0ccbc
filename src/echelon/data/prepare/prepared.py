"""A folder of prepared data: its splits, its counts, and the features as they were learnt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.described import read_description
from echelon.data.prepare import learnt
from echelon.data.prepare.encoders import Encoded, Encoders
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.recipe import Recipe
from echelon.data.shards.manifest import PREPARED, Manifest, read_manifest

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
        return learnt.load(folder) if folder.exists() else {}


def open_prepared(folder: str | Path) -> Prepared:
    """The prepared data in a folder; refuses what is none."""
    facts = read_description(Path(folder) / FILE, FORMAT, VERSION, "prepared data")
    return Prepared(Path(folder), facts, fresh=False)
