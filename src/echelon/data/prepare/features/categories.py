"""Features of categories: classes, one_hot, hashed, cross; and learning the categories of columns.

A column of categories is read as strings, int64 or float64 (`plain`); null is missing. Learning
counts the values of each block (`count`), merges the counts (`learn_categories`, `Tally`) and keeps
the sorted values. `encode` turns a value into its index among them, UNSEEN (−1) if train lacks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.hashing import hashes, joined
from echelon.data.prepare.features.numbers import named
from echelon.data.prepare.steps import (
    MADE,
    Columns,
    Feature,
    Ragged,
    Sparse,
    Values,
    gaps,
    is_text,
    mask,
)
from echelon.data.prepare.workdir import Learnt

Codes: TypeAlias = NDArray[np.int32]


class CategoryFeature(Feature):
    """A feature of one or several columns of categories."""

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        named(self)
        for name in self.sources:
            kind = names[name]
            bytes_of = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
            if bytes_of or pa.types.is_nested(kind) or isinstance(kind, pa.ExtensionType):
                raise DataError(
                    f"feature {self.kind}: column {name!r} is of type {kind}: categories "
                    f"are strings, whole numbers or truth values"
                )

    def columns(self, block: Columns) -> list[Any]:
        """Return one Arrow array of strings, int64 or float64 per column; null is missing.

        For kinds that are `by_category`, strings may come as a dictionary array.
        """
        return [column for name in self.sources for column in self._plain(name, block[name])]

    def _plain(self, name: str, values: Any) -> list[Any]:
        if self.by_category and _is_numbered(values):
            return [pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(_TEXT))]
        return plain(self.kind, name, values)


# Classes: labels as 0, 1, 2, …


class Classes(Feature):
    """The values of one column as 0, 1, 2, … in sorted order; refuses values that train lacks."""

    most: int = 100_000
    """The most classes; a column with more different values is refused."""

    passes: ClassVar[int] = 1

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        self.check(names)
        return {self.name: pa.int64()}

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        if len(self.sources) != 1:
            raise DataError(f"feature classes: it is made of one column, not {len(self.sources)}")
        kind = names[self.sources[0]]
        plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
        if not (plain or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            what = "made by another feature" if kind == MADE else f"of type {kind}"
            raise DataError(
                f"feature classes: column {self.sources[0]!r} is {what}; labels are text or numbers"
            )

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        column: Any = block[self.sources[0]]
        found = column.unique()
        found = found.filter(pa.array(~gaps(found)))
        self._few(len(found))
        return {_CLASSES: found.cast(pa.large_utf8()), _NUMBERS: not is_text(column.type)}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found: set[str] = set()
        numbers = True
        for partial in partials:
            found |= set(partial[_CLASSES].to_pylist())
            numbers = numbers and partial[_NUMBERS]
            self._few(len(found))
        ordered = sorted(found)
        if numbers:  # 2 comes before 10
            ordered.sort(key=_number)
        return {_CLASSES: ordered, _NUMBERS: numbers}

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        column: Any = block[self.sources[0]]
        unseen = mask(self._codes(column, learnt).is_null())
        rows = np.flatnonzero(unseen).tolist()
        labels = column.take(pa.array(rows, pa.int64()))
        return {
            row: self._absent() if absent else self._unseen(label, learnt)
            for row, label, absent in zip(rows, labels.to_pylist(), gaps(labels), strict=True)
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        codes = self._codes(block[self.sources[0]], learnt)
        return {self.name: codes.to_numpy(zero_copy_only=False).astype(np.int64)}

    def _codes(self, column: Any, learnt: Learnt) -> Any:
        known = pa.array(learnt[_CLASSES], pa.large_utf8())
        return pc.index_in(column.cast(pa.large_utf8()), known, skip_nulls=True)

    def _few(self, count: int) -> None:
        if count > self.most:
            raise DataError(
                f"feature classes: column {self.sources[0]!r} has more than {self.most:,} "
                f"different values: it holds no classes"
            )

    def _absent(self) -> str:
        return f"column {self.sources[0]!r} has no value: it is the class"

    def _unseen(self, label: Any, learnt: Learnt) -> str:
        known = learnt[_CLASSES]
        some = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        return f"class {label!r} of column {self.sources[0]!r} is not in train (there: {some})"


_CLASSES = "classes"
_NUMBERS = "numbers"
_SHOWN = 5


def _number(label: str) -> float:
    return float(label == "true") if label in ("true", "false") else float(label)


# One-hot: a column per category


class OneHot(CategoryFeature):
    """0 or 1, float32, for each of the sorted categories of train, one source after the other.

    Like scikit-learn's OneHotEncoder: a missing value is a category of its own if train has any,
    and a category that train lacks is 0 everywhere.
    """

    at_least: Annotated[int, Field(ge=1)] = 1
    """Categories that occur less often in train are ignored."""
    size: Annotated[int, Field(ge=1)] | None = None
    """The most categories per source: the most frequent ones are kept."""
    form: Literal["auto", "dense", "sparse"] = "auto"
    """Dense or sparse rows; `auto` decides by the number of columns."""
    unseen: Literal["zeros", "refuse"] = "zeros"
    """Whether a category that train lacks is all zeros, or refuses its record."""

    passes: ClassVar[int] = 1
    by_category: ClassVar[bool] = True

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        return count(self.columns(block))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found = learn_categories(self.sources, partials, self.at_least, self.size)
        if not sum(sizes(found)):
            names = ", ".join(self.sources)
            raise DataError(f"feature {self.kind}: {names}: train has no category")
        return found

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        if self.unseen == "zeros":
            return {}
        columns = self.columns(block)
        return {
            int(row): f"feature {self.name}: category {column[int(row)].as_py()!r} is not in train"
            for column, codes in zip(columns, encode(columns, learnt), strict=True)
            for row in np.flatnonzero(codes == UNSEEN)
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        codes, width = self._codes(block, learnt)
        dense = width <= DENSE if self.form == "auto" else self.form == "dense"
        return {self.name: spread(codes, width) if dense else listed(codes, width)}

    def _codes(self, block: Columns, learnt: Learnt) -> tuple[Codes, int]:
        """Return, for each source [N, sources], the output column that is 1, or UNSEEN."""
        ends = np.cumsum(sizes(learnt))
        columns = encode(self.columns(block), learnt)
        out = np.empty((len(columns[0]), len(columns)), np.int32)
        for at, (codes, start) in enumerate(zip(columns, [0, *ends[:-1].tolist()], strict=True)):
            np.add(codes, np.int32(start), out=out[:, at])
            if start and codes.min(initial=0) == UNSEEN:
                out[codes == UNSEEN, at] = UNSEEN
        return out, int(ends[-1])


DENSE = 64
"""With `form: auto` the result is dense up to this many columns."""


def spread(codes: Codes, width: int) -> NDArray[np.float32]:
    """Return dense rows with a 1 at each code that is not UNSEEN."""
    out = np.zeros((len(codes), width), np.float32)
    flat, starts = out.reshape(-1), np.arange(len(codes)) * width
    for column in codes.T:
        places = starts + column
        there = column != UNSEEN
        flat[places if there.all() else places[there]] = 1
    return out


def listed(codes: Codes, width: int) -> Sparse:
    """Return sparse rows with a 1 at each code that is not UNSEEN, codes ascending."""
    count, each = codes.shape
    indices, offsets = codes.reshape(-1), np.arange(0, codes.size + 1, each)
    if codes.min(initial=0) == UNSEEN:
        there = codes != UNSEEN
        indices, offsets = codes[there], np.zeros(count + 1, np.int64)
        np.cumsum(there.sum(1), out=offsets[1:])
    return Sparse(indices, np.ones(len(indices), np.float32), offsets, width)


# Hashing: a bucket per category, with nothing to learn


_HASH_TAG = 0xB0C4
_MISSING_BITS = key(_HASH_TAG, 0)
_NUMBER_SALT = key(_HASH_TAG, 1)
Buckets = Annotated[int, Field(ge=2, le=1 << 40)]


class Hashed(CategoryFeature):
    """The bucket of each category, int64 in [0, buckets), for an embedding; or sparse rows.

    Nothing is learnt: every category, new or not, and the missing value hash to a bucket. Equal
    categories of different sources hash independently.
    """

    buckets: Buckets = 1 << 18
    form: Literal["numbers", "sparse"] = "numbers"
    """Bucket numbers [N] or [N, sources]; or sparse rows that count each of the `buckets`."""
    seed: int = 0

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        found = [
            buckets(bits(column), self.buckets, key(_HASH_TAG, self.seed, at))
            for at, column in enumerate(self.columns(block))
        ]
        if self.form == "numbers":
            return {self.name: found[0] if len(found) == 1 else np.stack(found, 1)}
        return {self.name: _summed(np.stack(found, 1), self.buckets)}

    def different(self, learnt: Learnt) -> int | None:
        return self.buckets if self.form == "numbers" else None


def bits(column: Any) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each category, the same in every block and run."""
    if column.type == pa.large_utf8():
        found = hashes(column.fill_null(""))
    else:
        # Adding 0 turns −0.0 into 0.0, which has other bits.
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False) + 0
        found = words(np.ascontiguousarray(numbers).view(np.uint64), _NUMBER_SALT)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _MISSING_BITS
    return found


def buckets(found: NDArray[np.uint64], count: int, salt: int) -> NDArray[np.int64]:
    """Return the bucket of each hash."""
    return (words(found, salt) % np.uint64(count)).view(np.int64)


def _summed(codes: NDArray[np.int64], width: int) -> Sparse:
    """Return sparse rows with the number of times that each code occurs, codes ascending."""
    ordered = np.sort(codes, 1)
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    offsets = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(first.sum(1), out=offsets[1:])
    # The first code of a row always starts a run, so no run of equal codes crosses rows.
    starts = np.flatnonzero(first)
    values = np.diff(starts, append=first.size).astype(np.float32)
    return Sparse(ordered[first], values, offsets, width)


# Crosses: combinations of categories as categories


class Cross(CategoryFeature):
    """Combinations of two or more columns, each a category of its own.

    With `buckets`: the bucket of each combination, int64; a missing value counts like any other.
    Without: a string such as `Male × Sales`, for one_hot, target or hashed; missing if a part is.
    """

    buckets: Buckets | None = None
    seed: int = 0

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        if len(self.sources) < 2:
            raise DataError(f"feature {self.kind}: {self.sources[0]} alone: name two or more")

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        return super().makes(names) if self.buckets else {self.name: pa.large_utf8()}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        columns = self.columns(block)
        if self.buckets is None:
            texts = [column.cast(pa.large_utf8()) for column in columns]
            return {self.name: pc.binary_join_element_wise(*texts, SEPARATOR)}
        together = reduce(joined, (bits(column) for column in columns))
        return {self.name: buckets(together, self.buckets, key(_CROSS_TAG, self.seed))}

    def different(self, learnt: Learnt) -> int | None:
        return self.buckets


SEPARATOR = pa.scalar(" × ", pa.large_utf8())
_CROSS_TAG = 0xC505


# Learning the categories of columns


MOST = 1_000_000
"""The most categories of a column; more are a case for hashing."""
UNSEEN = -1
"""The code of a category that train lacks."""
_TEXT, _WHOLE, _NUMBER = pa.large_utf8(), pa.int64(), pa.float64()
_OFTEN = 1 << 20
"""Counts of blocks are merged when they have more values than this."""


def plain(kind: str, name: str, values: Values) -> list[Any]:
    """Return a column of categories as strings, int64 or float64; of a matrix, each column."""
    if isinstance(values, Sparse | Ragged):
        raise DataError(f"feature {kind}: column {name!r} has several values per record")
    if isinstance(values, np.ndarray):
        flat = values.reshape(len(values), -1) if values.ndim > 1 else values[:, None]
        return [_plain(pa.array(np.ascontiguousarray(column))) for column in flat.T]
    return [_plain(values)]


def labelled(kind: str, name: str, values: Values) -> list[Any]:
    """Like `plain`, for a label: an empty text is missing, too."""
    columns = plain(kind, name, values)
    return [
        pc.if_else(pa.array(gone), pa.scalar(None, column.type), column) if gone.any() else column
        for column, gone in zip(columns, map(gaps, columns), strict=True)
    ]


def _plain(values: Any) -> Any:
    form = values.type
    if pa.types.is_dictionary(form):
        return _plain(_decoded(values))
    if pa.types.is_boolean(form) or (pa.types.is_integer(form) and not pa.types.is_uint64(form)):
        return values.cast(_WHOLE)
    if pa.types.is_floating(form):
        numbers = values.cast(_NUMBER)
        return pc.if_else(pc.is_nan(numbers), pa.scalar(None, _NUMBER), numbers)
    return values.cast(_TEXT)


def _is_numbered(values: Any) -> bool:
    """Return whether these are dictionary-encoded texts."""
    if not isinstance(values, pa.DictionaryArray):
        return False
    return is_text(values.dictionary.type) and not values.dictionary.null_count


def _decoded(values: Any) -> Any:
    return values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values


def count(columns: Sequence[Any]) -> Learnt:
    """Return the different values of each column of a block, and how often they occur."""
    found: Learnt = {"missing": np.array([column.null_count for column in columns], np.int64)}
    for at, column in enumerate(columns):
        counted = pc.value_counts(column)
        values, counts = counted.field("values"), counted.field("counts")
        there = values.is_valid()
        found[f"values {at}"] = kept(_decoded(values.filter(there)))
        found[f"counts {at}"] = counts.filter(there).to_numpy()
    return found


def learn_categories(
    names: Sequence[str], partials: Iterable[Learnt], at_least: int = 1, size: int | None = None
) -> Learnt:
    """Merge what `count` found in all blocks to the sorted categories of each column."""
    tallies: list[Tally] = []
    missing: NDArray[np.int64] = np.zeros(0, np.int64)
    for partial in partials:
        if not tallies:
            labels = names if len(names) == len(partial["missing"]) else [", ".join(names)]
            tallies = [
                Tally(f"column {labels[min(at, len(labels) - 1)]!r}")
                for at in range(len(partial["missing"]))
            ]
            missing = np.zeros_like(partial["missing"])
        missing = missing + partial["missing"]
        for at, tally in enumerate(tallies):
            tally.add(partial[f"values {at}"], partial[f"counts {at}"])
    found: Learnt = {"missing": missing >= max(at_least, 1)}
    for at, tally in enumerate(tallies):
        found[f"categories {at}"] = tally.chosen(at_least, size)
    return found


class Tally:
    """Counts how often each value of one column occurs in all blocks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: list[Any] = []
        self._pending = 0

    def add(self, values: Any, counts: NDArray[np.int64]) -> None:
        self._parts.append(pa.table({"value": pa.array(values), "count": counts}))
        self._pending += len(counts)
        if self._pending > _OFTEN:
            self._settle()

    def any(self) -> bool:
        """Return whether there is any value."""
        return any(part.num_rows for part in self._parts)

    def _settle(self) -> Any:
        whole = pa.concat_tables(self._parts)
        whole = whole.group_by("value").aggregate([("count", "sum")])
        if whole.num_rows > MOST:
            raise DataError(
                f"{self._name} has more than {MOST:,} different values: use the kind `hashed`"
            )
        self._parts, self._pending = [whole.rename_columns(["value", "count"])], 0
        return self._parts[0]

    def chosen(self, at_least: int, size: int | None) -> Any:
        """Return the `size` most frequent of the values that occur `at_least` so often, sorted."""
        whole = self._settle()
        whole = whole.filter(pc.greater_equal(whole["count"], at_least))
        # Equally frequent values are ordered by value, so that the choice is reproducible.
        whole = whole.sort_by([("count", "descending"), ("value", "ascending")])
        values = whole["value"].slice(0, size).combine_chunks()
        return kept(values.take(pc.sort_indices(values)))


def kept(values: Any) -> Any:
    """Return the form that `Learnt` can hold: strings in Arrow, numbers in numpy."""
    return values if values.type == _TEXT else values.to_numpy(zero_copy_only=False)


def sizes(learnt: Learnt) -> list[int]:
    """Return the number of codes of each column: its categories, and missing if train has it."""
    return [
        len(learnt[f"categories {at}"]) + int(missing)
        for at, missing in enumerate(learnt["missing"])
    ]


def encode(columns: Sequence[Any], learnt: Learnt) -> list[Codes]:
    """Return the code of each value: its category, the last code for missing, or UNSEEN."""
    found = []
    for at, (column, missing) in enumerate(zip(columns, learnt["missing"], strict=True)):
        known = pa.array(learnt[f"categories {at}"])
        lacking = len(known) if missing else UNSEEN
        if isinstance(column, pa.DictionaryArray):
            codes = np.append(_codes(column.dictionary, known), np.int32(lacking))
            at_lacking = column.indices.fill_null(len(column.dictionary))
            found.append(codes.take(at_lacking.to_numpy()))
            continue
        codes = _codes(column, known)
        if missing and column.null_count:
            codes[column.is_null().to_numpy(zero_copy_only=False)] = lacking
        found.append(codes)
    return found


def _codes(column: Any, known: Any) -> Codes:
    numbers = pc.index_in(_as_known(column, known.type), known, skip_nulls=True)
    return np.array(numbers.fill_null(UNSEEN))


def _as_known(column: Any, kind: pa.DataType) -> Any:
    """Cast to the type that train had; a reader may infer another type from new records."""
    try:
        return column.cast(kind)
    except pa.ArrowException:
        raise DataError(
            f"a column of categories is of type {column.type}; in train it was {kind}"
        ) from None
