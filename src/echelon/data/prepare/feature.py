"""What every kind of feature has in common: columns in, columns out, and what it learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Self

import pyarrow as pa
from pydantic import Field, model_validator

from echelon.core.config.sections import Section, SettingError
from echelon.core.errors import DataError, unknown
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.learnt import Learnt

MADE = pa.null()
"""Stands for the type of a column that an earlier feature makes: it is known only then."""


class Feature(Section):
    """One row of a recipe's `features`. A kind is one class and one row of the registry.

    A kind with a setting `seed` that a recipe leaves out gets the recipe's own.
    """

    kind: str
    source: str | list[str] = Field(alias="from")
    """The column it is made of, or several: of the data, or of an earlier feature."""
    to: str = ""
    """What the new column is called; left out: as the one it is made of."""

    passes: ClassVar[int] = 0
    """How often it has to look at all rows of the train split before it can encode."""
    by_length: ClassVar[bool] = False
    """Whether the longer a text is, the more it makes of it."""
    by_category: ClassVar[bool] = False
    """Whether texts of its sources may come as numbers into a list of the different ones."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.sources:
            raise SettingError(f"feature {self.kind}: from = []: name at least one column", "from")
        return self

    @property
    def looks(self) -> int:
        """The same with these settings: kinds where it depends on them say so here."""
        return self.passes

    @property
    def sources(self) -> list[str]:
        """The columns it is made of."""
        return [self.source] if isinstance(self.source, str) else self.source

    @property
    def name(self) -> str:
        """The column it makes, where that is one."""
        return self.to or self.sources[0]

    def reads(self) -> list[str]:
        """Every column it wants to see: add those that other settings name, such as labels."""
        return self.sources

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """The columns it will make, and their types as far as they are known."""
        return {self.name: MADE}

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        """Refuse columns that are not there or of a wrong type, before any work is done."""
        for name in self.reads():
            if name not in names:
                raise DataError(f"feature {self.kind}: {unknown('column', name, names)}")

    def stamp(self) -> str:
        """Changes when a file does that it reads beside the data; nothing if it reads none."""
        return ""

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        """Pass `at` over the train rows of a block, in a worker: what this block says.

        `learnt` is what the passes before have learnt.
        """
        raise AssertionError(self.kind, at, len(block), len(learnt))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        """Merge what the blocks said, in their order: what the next pass or `encode` is given.

        In the parent. `partials` is an iterator that must not be kept whole; large things may go
        to files below `scratch`.
        """
        raise AssertionError(self.kind, at, partials, len(learnt), scratch)

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        """Rows that cannot be encoded, and why: they go to the quarantine."""
        return {}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        """The new columns, row for row. The same block and learnt give the same bytes."""
        raise AssertionError(self.kind, len(block), len(learnt))

    def different(self, learnt: Learnt) -> int | None:
        """How many tokens or categories its column can tell apart, where it holds such: they are
        numbered from 0."""
        return None
