"""Categories as the mean of what is to be predicted among their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.prepare.columns import RECORD, SPLIT, Columns, Values
from echelon.data.prepare.features.categories import (
    CategoryFeature,
    count,
    encode,
    labelled,
    learn_categories,
    sizes,
)
from echelon.data.prepare.features.figures import Figures
from echelon.data.prepare.features.numbers import matrix
from echelon.data.prepare.learnt import Learnt

_TAG = 0x7A46
_TRAIN = 0
_NAMES = ("count", "mean", "squares")


class Target(CategoryFeature):
    """The smoothed mean of `label` for each category, float32, as scikit-learn's TargetEncoder.

    A record of train must not see its own label: train is divided into `folds` by the records'
    numbers, and those of a fold are encoded by what the other folds say. All other records are
    encoded by the whole of train. A category that is not there gets the mean of all labels; a
    missing value is a category of its own. Train records without a label are not learnt from.
    """

    label: str
    """What is to be predicted."""
    of: Literal["number", "class"] = "number"
    """The label's mean; or the share of each class (of two classes, of the second alone)."""
    smooth: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """As many records with the mean of all labels are added to each category; or as many as the
    spread of labels within a category and over all suggests (empirical Bayes)."""
    folds: Annotated[int, Field(ge=2, le=100)] = 5
    seed: int = 0

    passes: ClassVar[int] = 2
    by_category: ClassVar[bool] = True

    def reads(self) -> list[str]:
        return [*self.sources, self.label, SPLIT, RECORD]

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check({**names, SPLIT: pa.int8(), RECORD: pa.int64()})
        kind = names[self.label]
        if self.of == "number" and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"feature {self.kind}: label {self.label!r} is of type {kind}: say `of: class`"
            )

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        if at == 0:
            return count([*self.columns(block), *self._classes(block)])
        y = self._y(block, learnt)
        there = np.flatnonzero(~np.isnan(y).any(1))
        y, fold = y[there], self._fold(block)[there]
        found = _partial("y", fold, self.folds, y)
        for number, codes in enumerate(encode(self.columns(block), learnt)):
            size = _size(learnt, number)
            found |= _partial(str(number), fold * size + codes[there], self.folds * size, y)
        return found

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if at == 0:
            return self._named(learn_categories(self.sources, partials))
        width = _width(learnt)
        groups = {"y": self.folds}
        for number in range(_sources(learnt)):
            groups[str(number)] = self.folds * _size(learnt, number)
        whole = {name: Figures.none(size, width) for name, size in groups.items()}
        for partial in partials:
            for name, figures in whole.items():
                at_groups = partial[f"groups {name}"]
                new = Figures(*(partial[f"{part} {name}"] for part in _NAMES))
                figures.put(at_groups, figures.at(at_groups).merged(new))
        if not whole["y"].count.any():
            raise DataError(f"feature {self.kind}: no record of train has a {self.label!r}")
        tables = {
            f"table {number}": self._table(whole[str(number)], whole["y"])
            for number in range(_sources(learnt))
        }
        return {**learnt, **tables}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        # Where nothing is known of splits, as with new data, no record is one of train.
        known = SPLIT in block and RECORD in block
        held = self.folds
        fold = np.where(block[SPLIT] == _TRAIN, self._fold(block), held) if known else held
        columns = encode(self.columns(block), learnt)
        # UNSEEN is −1: the last entry, which is the mean of all.
        found = [learnt[f"table {at}"][fold, codes] for at, codes in enumerate(columns)]
        out = np.concatenate(found, 1).astype(np.float32)
        return {self.name: out[:, 0] if out.shape[1] == 1 else out}

    def _fold(self, block: Columns) -> NDArray[np.int64]:
        records: Any = block[RECORD]
        lots = words(records.astype(np.uint64), key(_TAG, self.seed))
        return (lots % np.uint64(self.folds)).astype(np.int64)

    def _classes(self, block: Columns) -> list[Any]:
        return labelled(self.kind, self.label, block[self.label]) if self.of == "class" else []

    def _named(self, found: Learnt) -> Learnt:
        """Categories, and apart from them the classes, which were counted as one more column."""
        if self.of == "number":
            return found
        last = len(found["missing"]) - 1
        found["classes"] = found.pop(f"categories {last}")
        found["missing"] = found["missing"][:last]
        if len(found["classes"]) < 2:
            raise DataError(f"feature {self.kind}: label {self.label!r} has one class in train")
        return found

    def _y(self, block: Columns, learnt: Learnt) -> NDArray[np.float64]:
        """[N, K]: the number, or 0 and 1 for each class; NaN where it is missing."""
        if self.of == "number":
            return matrix(self.kind, block, [self.label])
        classes = {"categories 0": learnt["classes"], "missing": np.array([False])}
        (codes,) = encode(self._classes(block), classes)
        hot: NDArray[np.float64] = (codes[:, None] == np.arange(len(learnt["classes"]))) + 0.0
        hot[codes < 0] = np.nan
        return hot[:, 1:] if hot.shape[1] == 2 else hot

    def _table(self, groups: Figures, labels: Figures) -> NDArray[np.float64]:
        """[folds + 1, categories + 1, K]: by the other folds, or by all; the last is the mean."""
        size = len(groups.count) // self.folds
        folds = [groups.at(slice(at * size, (at + 1) * size)) for at in range(self.folds)]
        whole = [labels.at(slice(at, at + 1)) for at in range(self.folds)]
        rows = []
        for fold in range(self.folds + 1):
            others = [at for at in range(self.folds) if at != fold]
            rows.append(
                self._encoding(
                    reduce(Figures.merged, [folds[at] for at in others]),
                    reduce(Figures.merged, [whole[at] for at in others]),
                )
            )
        return np.stack(rows)

    def _encoding(self, groups: Figures, labels: Figures) -> NDArray[np.float64]:
        mean = labels.mean
        size = groups.count[:, None]
        if self.smooth == "auto":
            spread = labels.squares / np.maximum(labels.count, 1)[:, None]
            own = groups.squares / np.maximum(size, 1)
            both = spread * size + own
            trust = np.divide(spread * size, both, out=np.zeros_like(both), where=both > 0)
        else:
            trust = size / np.maximum(size + self.smooth, np.finfo(float).tiny)
        return np.concatenate([trust * groups.mean + (1 - trust) * mean, mean])


def _partial(name: str, groups: NDArray[np.int64], size: int, y: NDArray[np.float64]) -> Learnt:
    """Figures of the groups that occur."""
    found = np.unique(groups)
    place = np.zeros(size, np.int64)
    place[found] = np.arange(len(found))
    figures = Figures.of(place[groups], len(found), y)
    named = {f"{part} {name}": getattr(figures, part) for part in _NAMES}
    return {f"groups {name}": found, **named}


def _sources(learnt: Learnt) -> int:
    return len(learnt["missing"])


def _size(learnt: Learnt, number: int) -> int:
    return sizes(learnt)[number]


def _width(learnt: Learnt) -> int:
    classes = len(learnt.get("classes", ()))
    return classes if classes > 2 else 1
