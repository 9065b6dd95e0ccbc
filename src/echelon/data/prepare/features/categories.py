"""Columns of categories: strings, whole numbers, truth values; and those that train has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.clean.missing import gaps
from echelon.data.prepare.columns import Columns, Ragged, Sparse, Values
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.features.numbers import named
from echelon.data.prepare.keys import is_text
from echelon.data.prepare.learnt import Learnt

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
