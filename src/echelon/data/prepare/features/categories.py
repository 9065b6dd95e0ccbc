"""Classes, one_hot, hashed, cross."""

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

# --- categories ---
# Columns of categories: strings, whole numbers, truth values; and those that train has.

MOST = 1_000_000
"""More categories than this are refused: they are for hashing."""
UNSEEN = -1
Codes: TypeAlias = NDArray[np.int32]
_TEXT, _WHOLE, _NUMBER = pa.large_utf8(), pa.int64(), pa.float64()
_OFTEN = 1 << 20


class CategoryFeature(Feature):
    """A feature made of one or several columns of categories."""

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
        """One Arrow array of strings, int64 or float64 per column; null is missing. Strings may be
        numbered (a dictionary array), for a kind that is `by_category`."""
        return [column for name in self.sources for column in self._plain(name, block[name])]

    def _plain(self, name: str, values: Any) -> list[Any]:
        if self.by_category and _is_numbered(values):
            return [pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(_TEXT))]
        return plain(self.kind, name, values)


def _is_numbered(values: Any) -> bool:
    """Whether these are numbers into a list of texts."""
    if not isinstance(values, pa.DictionaryArray):
        return False
    return is_text(values.dictionary.type) and not values.dictionary.null_count


def plain(kind: str, name: str, values: Values) -> list[Any]:
    """A column of categories in one of three types; the columns of a matrix apart."""
    if isinstance(values, Sparse | Ragged):
        raise DataError(f"feature {kind}: column {name!r} has several values per record")
    if isinstance(values, np.ndarray):
        flat = values.reshape(len(values), -1) if values.ndim > 1 else values[:, None]
        return [_plain(pa.array(np.ascontiguousarray(column))) for column in flat.T]
    return [_plain(values)]


def labelled(kind: str, name: str, values: Values) -> list[Any]:
    """The same of a label: of one that is an empty text nothing is learnt."""
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


def count(columns: Sequence[Any]) -> Learnt:
    """The different values of each column of a block, and how often they occur."""
    found: Learnt = {"missing": np.array([column.null_count for column in columns], np.int64)}
    for at, column in enumerate(columns):
        counted = pc.value_counts(column)
        values, counts = counted.field("values"), counted.field("counts")
        there = values.is_valid()
        found[f"values {at}"] = kept(_decoded(values.filter(there)))
        found[f"counts {at}"] = counts.filter(there).to_numpy()
    return found


def _decoded(values: Any) -> Any:
    return values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values


def kept(values: Any) -> Any:
    """Strings as Arrow has them, numbers as numpy does: what `Learnt` may hold."""
    return values if values.type == _TEXT else values.to_numpy(zero_copy_only=False)


class Tally:
    """How often each value of one column occurs in all blocks."""

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
        """Whether there is any value at all."""
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
        """Sorted values that occur `at_least` so often, the `size` most frequent of them."""
        whole = self._settle()
        whole = whole.filter(pc.greater_equal(whole["count"], at_least))
        # By value among those as frequent, so that it is always the same ones.
        whole = whole.sort_by([("count", "descending"), ("value", "ascending")])
        values = whole["value"].slice(0, size).combine_chunks()
        return kept(values.take(pc.sort_indices(values)))


def learn_categories(
    names: Sequence[str], partials: Iterable[Learnt], at_least: int = 1, size: int | None = None
) -> Learnt:
    """What `count` found in all blocks: the categories of each column, sorted."""
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


def sizes(learnt: Learnt) -> list[int]:
    """How many numbers each column has: one per category, and one for missing if train has it."""
    return [
        len(learnt[f"categories {at}"]) + int(missing)
        for at, missing in enumerate(learnt["missing"])
    ]


def encode(columns: Sequence[Any], learnt: Learnt) -> list[Codes]:
    """The number of each record's category; the last one is missing; UNSEEN is not in train."""
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
    """New records may have read a column as another type than train had."""
    try:
        return column.cast(kind)
    except pa.ArrowException:
        raise DataError(
            f"a column of categories is of type {column.type}; in train it was {kind}"
        ) from None


# --- classes ---
# Labels → numbers 0, 1, 2, … in the order of the labels.

_CLASSES = "classes"
_NUMBERS = "numbers"
_SHOWN = 5


class Classes(Feature):
    """Whole numbers for the values of one column; a value that train does not have is refused."""

    most: int = 100_000
    """More different values than this are no classes."""

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
        return {_CLASSES: found.cast(pa.large_utf8()), _NUMBERS: not _is_text(column)}

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


def _is_text(column: Any) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _number(label: str) -> float:
    return float(label == "true") if label in ("true", "false") else float(label)


# --- one_hot ---
# A column for each category, with a 1 in the one that is.

DENSE = 64
"""Up to this many columns the result is dense, where the recipe does not say."""


class OneHot(CategoryFeature):
    """0 and 1, float32, for the sorted categories of train, one source after the other.

    As scikit-learn's OneHotEncoder: a missing value is a category of its own if train has any,
    and a category that train has not is 0 everywhere.
    """

    at_least: Annotated[int, Field(ge=1)] = 1
    """Categories that train has less often are as if it had them not."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Of each source only so many categories, the most frequent ones."""
    form: Literal["auto", "dense", "sparse"] = "auto"
    """Rows of all columns, or of those that are 1 alone; by the number of columns if not said."""
    unseen: Literal["zeros", "refuse"] = "zeros"
    """What becomes of a record with a category that train has not."""

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
        """[N, sources]: which column of the result is 1, or UNSEEN."""
        ends = np.cumsum(sizes(learnt))
        columns = encode(self.columns(block), learnt)
        out = np.empty((len(columns[0]), len(columns)), np.int32)
        for at, (codes, start) in enumerate(zip(columns, [0, *ends[:-1].tolist()], strict=True)):
            np.add(codes, np.int32(start), out=out[:, at])
            if start and codes.min(initial=0) == UNSEEN:
                out[codes == UNSEEN, at] = UNSEEN
        return out, int(ends[-1])


def spread(codes: Codes, width: int) -> NDArray[np.float32]:
    """Dense rows with a 1 at each code that is not UNSEEN."""
    out = np.zeros((len(codes), width), np.float32)
    flat, starts = out.reshape(-1), np.arange(len(codes)) * width
    for column in codes.T:
        places = starts + column
        there = column != UNSEEN
        flat[places if there.all() else places[there]] = 1
    return out


def listed(codes: Codes, width: int) -> Sparse:
    """The same as sparse rows; each has its codes in rising order."""
    count, each = codes.shape
    indices, offsets = codes.reshape(-1), np.arange(0, codes.size + 1, each)
    if codes.min(initial=0) == UNSEEN:
        there = codes != UNSEEN
        indices, offsets = codes[there], np.zeros(count + 1, np.int64)
        np.cumsum(there.sum(1), out=offsets[1:])
    return Sparse(indices, np.ones(len(indices), np.float32), offsets, width)


# --- hashed ---
# Categories as numbers of a fixed number of buckets: nothing is learnt, however many there are.

_HASHED_TAG = 0xB0C4
_MISSING = key(_HASHED_TAG, 0)
_HASHED_NUMBER = key(_HASHED_TAG, 1)

Buckets = Annotated[int, Field(ge=2, le=1 << 40)]


class Hashed(CategoryFeature):
    """The bucket of each category, int64 in [0, buckets), for an embedding; or sparse rows.

    Whatever is seen for the first time has its bucket; so have missing values. Equal categories of
    different sources have buckets of their own.
    """

    buckets: Buckets = 1 << 18
    form: Literal["numbers", "sparse"] = "numbers"
    """[N] or [N, sources] numbers; or rows of `buckets` columns that are how often each occurs."""
    seed: int = 0

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        found = [
            buckets(bits(column), self.buckets, key(_HASHED_TAG, self.seed, at))
            for at, column in enumerate(self.columns(block))
        ]
        if self.form == "numbers":
            return {self.name: found[0] if len(found) == 1 else np.stack(found, 1)}
        return {self.name: _summed(np.stack(found, 1), self.buckets)}

    def different(self, learnt: Learnt) -> int | None:
        return self.buckets if self.form == "numbers" else None


def bits(column: Any) -> NDArray[np.uint64]:
    """64 bits for each category, the same in every block and run."""
    if column.type == pa.large_utf8():
        found = hashes(column.fill_null(""))
    else:
        # 0.0 and −0.0 are one number and two patterns of bits.
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False) + 0
        found = words(np.ascontiguousarray(numbers).view(np.uint64), _HASHED_NUMBER)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _MISSING
    return found


def buckets(found: NDArray[np.uint64], count: int, salt: int) -> NDArray[np.int64]:
    """The bucket of each."""
    return (words(found, salt) % np.uint64(count)).view(np.int64)


def _summed(codes: NDArray[np.int64], width: int) -> Sparse:
    """Sparse rows that say how often each code occurs, in rising order."""
    ordered = np.sort(codes, 1)
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    offsets = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(first.sum(1), out=offsets[1:])
    # A row's first code is always one: so no run of equal codes goes on into the next row.
    starts = np.flatnonzero(first)
    values = np.diff(starts, append=first.size).astype(np.float32)
    return Sparse(ordered[first], values, offsets, width)


# --- cross ---
# Several categories as one: each combination is a category of its own.

SEPARATOR = pa.scalar(" × ", pa.large_utf8())
_CROSS_TAG = 0xC505


class Cross(CategoryFeature):
    """Combinations of two or more columns.

    With `buckets`, the bucket of each (int64), where a missing value is as good as any other.
    Without, a string such as `Male × Sales` for one_hot, target or hashed; it is missing where one
    of its parts is.
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
