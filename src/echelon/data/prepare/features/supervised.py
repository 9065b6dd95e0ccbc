"""Features that learn from a label: target encoding of categories, and selection of columns.

Both make two passes over train: the first finds the categories, classes or bounds of bins, the
second counts labels within them. Records without a label are not learnt from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.prepare.features import categories, quantiles
from echelon.data.prepare.features.categories import (
    CategoryFeature,
    count,
    encode,
    labelled,
    learn_categories,
    sizes,
)
from echelon.data.prepare.features.numbers import bin_bounds, binned, matrix, named
from echelon.data.prepare.ranking import TRAIN
from echelon.data.prepare.steps import RECORD, SPLIT, Array, Columns, Feature, Sparse, Values
from echelon.data.prepare.workdir import Learnt

Integers = NDArray[np.int64]


# Target: categories as the mean of a label


class Target(CategoryFeature):
    """The smoothed mean of `label` for each category, float32, like scikit-learn's TargetEncoder.

    A train record must not see its own label: train is divided into `folds` by record number, and
    the records of a fold are encoded by the means of the other folds. All other records are encoded
    by the means of the whole of train. A category that train lacks gets the mean of all labels; a
    missing value is a category of its own.
    """

    label: str
    """The column to predict."""
    of: Literal["number", "class"] = "number"
    """Mean of a number, or share of each class (with two classes, of the second one only)."""
    smooth: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """So many records with the mean of all labels are added to each category; `auto` chooses the
    number by the variance of labels within the category and overall (empirical Bayes)."""
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
        # Without the column of splits, as with new records, no record belongs to train.
        known = SPLIT in block and RECORD in block
        held = self.folds
        fold = np.where(block[SPLIT] == TRAIN, self._fold(block), held) if known else held
        columns = encode(self.columns(block), learnt)
        # UNSEEN is −1: the last entry, which is the mean of all labels.
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
        """Separate the classes, which were counted as one more column, from the categories."""
        if self.of == "number":
            return found
        last = len(found["missing"]) - 1
        found["classes"] = found.pop(f"categories {last}")
        found["missing"] = found["missing"][:last]
        if len(found["classes"]) < 2:
            raise DataError(f"feature {self.kind}: label {self.label!r} has one class in train")
        return found

    def _y(self, block: Columns, learnt: Learnt) -> NDArray[np.float64]:
        """Return the labels [N, K]: the number, or 0 and 1 for each class; NaN if missing."""
        if self.of == "number":
            return matrix(self.kind, block, [self.label])
        classes = {"categories 0": learnt["classes"], "missing": np.array([False])}
        (codes,) = encode(self._classes(block), classes)
        hot: NDArray[np.float64] = (codes[:, None] == np.arange(len(learnt["classes"]))) + 0.0
        hot[codes < 0] = np.nan
        return hot[:, 1:] if hot.shape[1] == 2 else hot

    def _table(self, groups: Figures, labels: Figures) -> NDArray[np.float64]:
        """Return the encodings [folds + 1, categories + 1, K].

        Fold f is encoded by the other folds, the last one by all. The last category is the mean.
        """
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
        """Return the smoothed mean of each category, and after them that of all labels."""
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


_TAG = 0x7A46
_NAMES = ("count", "mean", "squares")


def _partial(name: str, groups: NDArray[np.int64], size: int, y: NDArray[np.float64]) -> Learnt:
    """Return the figures of the groups that occur in a block."""
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


@dataclass(frozen=True, slots=True)
class Figures:
    """Count [G], mean and sum of squared deviations [G, K] of K numbers in G groups of records."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, *shape: int) -> Figures:
        """Return the figures of groups without records; shape is (…, groups, K)."""
        return cls(np.zeros(shape[:-1]), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, groups: Integers, size: int, values: NDArray[np.float64]) -> Figures:
        """Return the figures of values [N, K] whose groups, numbered below `size`, are [N]."""
        count = np.bincount(groups, minlength=size).astype(np.float64)
        some = np.maximum(count, 1)[:, None]
        mean = _sums(groups, size, values) / some
        return cls(count, mean, _sums(groups, size, (values - mean[groups]) ** 2))

    def merged(self, other: Figures) -> Figures:
        """Return the figures of both sets of records, without loss of digits (Chan et al.)."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)[..., None]
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap**2 * self.count[..., None] * share
        return Figures(count, self.mean + gap * share, squares)

    def at(self, groups: Any) -> Figures:
        """Return the figures of some groups."""
        return Figures(self.count[groups], self.mean[groups], self.squares[groups])

    def put(self, groups: Integers, figures: Figures) -> None:
        """Replace the figures of some groups, in place."""
        self.count[groups] = figures.count
        self.mean[groups] = figures.mean
        self.squares[groups] = figures.squares


def _sums(groups: Integers, size: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = [np.bincount(groups, column, size) for column in values.T]
    return np.stack(sums, 1) if sums else np.zeros((size, 0))


# Select: the columns that say most about a label


class Select(Feature):
    """The `size` columns with the most mutual information with `label`, in their old order.

    For columns of numbers, the information of their quantile bins counts (missing values are a bin
    of their own); for sparse columns, that of being nonzero. Like scikit-learn's
    mutual_info_classif for discrete features. Values are unchanged, float32; missing ones are NaN.
    """

    label: str
    """The column to predict."""
    of: Literal["class", "number"] = "class"
    """Whether the label is a class, or a number, which is put into bins too."""
    size: Annotated[int, Field(ge=1)]
    """The number of columns to keep."""
    bins: Annotated[int, Field(ge=2, le=1024)] = 16

    passes: ClassVar[int] = 2

    def reads(self) -> list[str]:
        return [*self.sources, self.label]

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        named(self)

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        sparse = self._sparse(block)
        if at == 0:
            columns = [] if sparse else list(self._matrix(block).T)
            labels = self._labels(block)
            if self.of == "number":
                return {**quantiles.partial([*columns, labels]), "sparse": sparse is not None}
            found = {**quantiles.partial(columns), **categories.count([labels])}
            return {**found, "sparse": sparse is not None}
        codes, kinds = self._codes(block, learnt)
        there = codes >= 0
        if sparse:
            return presence(sparse, codes, kinds)
        bounds = quantiles.apart(learnt["bounds"], learnt["sizes"])
        numbers = binned(self._matrix(block), bounds, self.bins)
        return {"table": contingency(numbers[there], codes[there], self.bins + 1, kinds)}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if at == 0:
            return self._discretised(partials)
        whole: Learnt = {}
        for partial in partials:
            for name, values in partial.items():
                whole[name] = whole[name] + values if name in whole else values
        found = presence_information(**whole) if learnt["sparse"] else information(whole["table"])
        if self.size > len(found):
            raise DataError(f"feature {self.kind}: {self.size} of {len(found)} columns")
        # Among columns of equal information, the first ones.
        chosen = np.sort(np.argsort(-found, kind="stable")[: self.size])
        return {"information": found, "chosen": chosen}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        chosen, sparse = learnt["chosen"], self._sparse(block)
        if sparse is None:
            return {self.name: self._matrix(block)[:, chosen].astype(np.float32, order="C")}
        places = np.full(sparse.width, -1, np.int64)
        places[chosen] = np.arange(len(chosen))
        indices = places[sparse.indices]
        kept = indices >= 0
        offsets = np.concatenate([[0], kept.cumsum()])[sparse.offsets]
        values = sparse.values[kept].astype(np.float32)
        return {self.name: Sparse(indices[kept], values, offsets, len(chosen))}

    def _discretised(self, partials: Iterable[Learnt]) -> Learnt:
        """Return the bounds of bins of all columns, and the classes or bounds of the label."""
        columns, tally = quantiles.Sketches(), categories.Tally(f"column {self.label!r}")
        sparse = False
        for partial in partials:
            columns.add(partial)
            sparse = partial["sparse"]
            if self.of == "class":
                tally.add(partial["values 0"], partial["counts 0"])
        found = columns.summaries()
        if not (tally.any() if self.of == "class" else found and len(found[-1].values)):
            raise DataError(f"feature {self.kind}: no record of train has a {self.label!r}")
        learnt: Learnt = {"sparse": sparse}
        if self.of == "class":
            learnt["classes"] = tally.chosen(1, None)
        else:
            learnt["label"] = _few_or_quantiles(found.pop(), self.bins)
        bounds = [_few_or_quantiles(summary, self.bins) for summary in found]
        learnt["bounds"] = np.concatenate([np.empty(0), *bounds])
        learnt["sizes"] = np.array([len(bound) for bound in bounds], np.int64)
        return learnt

    def _sparse(self, block: Columns) -> Sparse | None:
        first = block[self.sources[0]]
        return first if isinstance(first, Sparse) and len(self.sources) == 1 else None

    def _matrix(self, block: Columns) -> NDArray[np.float64]:
        return matrix(self.kind, block, self.sources)

    def _labels(self, block: Columns) -> Any:
        if self.of == "number":
            return matrix(self.kind, block, [self.label])[:, 0]
        (column,) = categories.labelled(self.kind, self.label, block[self.label])
        return column

    def _codes(self, block: Columns, learnt: Learnt) -> tuple[Array, int]:
        """Return class or bin of each label, −1 if missing, and the number of classes or bins."""
        labels = self._labels(block)
        if self.of == "number":
            return binned(labels[:, None], [learnt["label"]], -1)[:, 0], self.bins
        known = {"categories 0": learnt["classes"], "missing": np.array([False])}
        return categories.encode([labels], known)[0], len(learnt["classes"])


def _few_or_quantiles(summary: quantiles.Summary, bins: int) -> NDArray[np.float64]:
    """Return a bin per value if there are few, so that rare ones are not lost; else quantiles."""
    if len(summary.values) <= bins:
        return summary.values[1:]
    return bin_bounds(summary, bins)


def contingency(values: Integers, labels: Integers, bins: int, kinds: int) -> Integers:
    """Return how often each bin of each column of `values` [N, D] occurs with each label.

    The result is [D, bins, kinds].
    """
    columns = [np.bincount(column * kinds + labels, minlength=bins * kinds) for column in values.T]
    return np.stack(columns).reshape(-1, bins, kinds)


def information(table: Integers) -> NDArray[np.float64]:
    """Return the mutual information [D] in nats from a contingency table [D, bins, kinds]."""
    whole = table.sum((1, 2), keepdims=True)
    expected = table.sum(2, keepdims=True) * (table.sum(1, keepdims=True) / np.maximum(whole, 1))
    ratio = np.divide(table, expected, out=np.ones_like(expected), where=table > 0)
    found = (table * np.log(ratio)).sum((1, 2)) / np.maximum(whole[:, 0, 0], 1)
    return np.asarray(np.maximum(found, 0), np.float64)


def presence(rows: Sparse, labels: Integers, kinds: int) -> dict[str, Any]:
    """Return how often each column is nonzero with each label, and how often each label occurs."""
    there = np.repeat(labels, np.diff(rows.offsets))
    entry = (rows.values != 0) & (there >= 0)
    flat = np.bincount(
        rows.indices[entry].astype(np.int64) * kinds + there[entry], minlength=rows.width * kinds
    )
    counts = np.bincount(labels[labels >= 0], minlength=kinds)
    return {"table": flat.reshape(rows.width, kinds), "counts": counts}


def presence_information(table: Integers, counts: Integers) -> NDArray[np.float64]:
    """Return the mutual information [D] in nats from the counts of `presence`."""
    return information(np.stack([table, counts - table], 1))
