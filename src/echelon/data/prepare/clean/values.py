"""Cleaning steps that check and change the values of columns: missing, range, types, length, text.

A step drops records, with a reason for each, or replaces values. Only `Missing` with a mean or a
median needs a pass over all records before (`look` and `learn`); the other steps look at one block.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.formats.records import arrow_type, fit
from echelon.data.prepare.steps import (
    Cleaned,
    ColumnStep,
    gaps,
    is_number,
    is_text,
    mask,
    replaced,
    without,
)
from echelon.data.prepare.workdir import Learnt

# Missing values

SUFFIX = "_missing"
"""The end of an indicator column's name."""


class Missing(ColumnStep):
    """Drop or fill missing values: nulls, NaN and empty texts.

    Integer columns become float64 if a mean, a median or a fraction is filled in.
    """

    kind: Literal["missing"] = "missing"
    how: Literal["drop", "constant", "mean", "median"] = "drop"
    value: bool | int | float | str | None = None
    """The value to fill in, with how: constant."""
    indicator: bool = False
    """Add a boolean column `<column>_missing`, true where a value was missing."""

    types: ClassVar[str] = "numbers, for a mean or a median"
    passes: ClassVar[int] = 1

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (self.how == "constant") != (self.value is not None):
            word = "needs a" if self.how == "constant" else "takes no"
            raise SettingError(f"step missing: how: {self.how} {word} value", "value", "how")
        if self.indicator and self.how == "drop":
            raise SettingError(
                "step missing: an indicator of records that are dropped says nothing",
                "indicator",
                "how",
            )
        return self

    @property
    def looks(self) -> int:
        return int(self.how in ("mean", "median"))

    def adds(self) -> dict[str, str]:
        return {name + SUFFIX: name for name in self.columns} if self.indicator else {}

    def fits(self, kind: pa.DataType) -> bool:
        return is_number(kind) or not self.looks

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        for name in self.columns:
            if self.how == "constant":
                self._constant(name, names[name])
            if self.how != "drop":
                after[name] = self._filled(names[name])
            if self.indicator:
                if name + SUFFIX in names:
                    raise DataError(f"step missing: there is a column {name + SUFFIX!r} already")
                after[name + SUFFIX] = pa.bool_()
        return after

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        found: Learnt = {}
        for name in self.columns:
            values = _present(block.column(name))
            found[name] = values if self.how == "median" else np.array([values.sum(), len(values)])
        return found

    def learn(
        self,
        at: int,
        partials: Iterable[Learnt],
        learnt: Learnt,
        scratch: Path,
    ) -> Learnt:
        if self.how == "median":
            found = _medians(self.columns, partials, scratch)
        else:
            found = _means(self.columns, partials)
        for name, value in found.items():
            if value is None:
                raise DataError(
                    f"step missing: column {name!r} has no value to take a {self.how} of"
                )
        return dict(found)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        if self.how == "drop":
            reasons: dict[int, str] = {}
            for name in self.columns:
                for row in np.flatnonzero(gaps(block.column(name))).tolist():
                    reasons.setdefault(row, f"{name!r} is missing")
            return without(block, reasons)
        filled = 0
        for name in self.columns:
            column = block.column(name)
            gone = gaps(column)
            filled += int(gone.sum())
            if self.looks:
                value = pa.scalar(learnt[name], pa.float64())
            else:
                value = self._constant(name, column.type)
            if value.type != column.type:
                column = _floats(column)
            block = replaced(block, name, pc.if_else(pa.array(gone), value, column))
            if self.indicator:
                block = replaced(block, name + SUFFIX, pa.array(gone))
        return Cleaned(block, counts={"filled": filled})

    def _filled(self, kind: pa.DataType) -> pa.DataType:
        """Return the type of a column after filling: integers cannot hold a fraction."""
        fraction = isinstance(self.value, float) and self.value % 1 > 0
        return pa.float64() if self.looks or (fraction and pa.types.is_integer(kind)) else kind

    def _constant(self, name: str, kind: pa.DataType) -> Any:
        """Return the constant in the column's type after filling.

        Refuse values that the type cannot hold; Arrow would truncate some and make others infinite.
        """
        filled = self._filled(kind)
        try:
            value = pa.scalar(self.value, filled)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
            value = None
        if value is None or (isinstance(self.value, float) and not _same(self.value, value)):
            raise DataError(
                f"step missing: value {self.value!r} is not of type {kind}, as column {name!r} is"
            )
        return value


def _same(number: float, value: Any) -> bool:
    """Return whether a float was converted to a number type without becoming infinite."""
    return is_number(value.type) and math.isinf(value.as_py()) == math.isinf(number)


def _floats(column: Any) -> Any:
    """Cast to the nearest float64; not every integer beyond 2^53 has an exact one."""
    return column.cast(pa.float64(), safe=False)


def _present(column: Any) -> NDArray[np.float64]:
    values: NDArray[np.float64] = _floats(column).drop_null().to_numpy()
    return values[~np.isnan(values)]


def _means(names: Iterable[str], partials: Iterable[Learnt]) -> dict[str, float | None]:
    totals = {name: np.zeros(2) for name in names}
    for partial in partials:
        for name, total in totals.items():
            total += partial[name]
    return {name: float(s / n) if n else None for name, (s, n) in totals.items()}


def _medians(
    names: Iterable[str], partials: Iterable[Learnt], scratch: Path
) -> dict[str, float | None]:
    medians = {name: Median(scratch / f"median-{at}") for at, name in enumerate(names)}
    for partial in partials:
        for name, median in medians.items():
            median.add(partial[name])
    return {name: median.value() for name, median in medians.items()}


_BITS = 16
_CHUNK = 1 << 20
_SIGN = np.uint64(1 << 63)


class Median:
    """The exact median of more numbers than fit into memory.

    The numbers go to a file; `value` is a radix search by sixteen bits at a time. Floats sort like
    their bits as unsigned integers, after all bits of negative ones and the sign of the others are
    flipped. Four passes over the file count the numbers by their next sixteen bits, among those
    that share the bits found so far; the counts give the next bits of the median.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        path.write_bytes(b"")

    def add(self, values: NDArray[np.float64]) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(values, np.float64).tobytes())
        self._count += len(values)

    def value(self) -> float | None:
        """Return the median, the mean of the two middle numbers if their count is even, or None."""
        if not self._count:
            return None
        low, high = self._at((self._count - 1) // 2), self._at(self._count // 2)
        middle = (low + high) / 2  # rounded once; low + (high - low) / 2 would round twice
        return middle if np.isfinite(middle) else low / 2 + high / 2

    def _at(self, place: int) -> float:
        """Return the number at this place of the sorted numbers, from 0."""
        found = 0
        for shift in range(64 - _BITS, -1, -_BITS):
            counts = np.zeros(1 << _BITS, np.int64)
            for keys in self._keys():
                # A shift by 64 bits is undefined; in the first pass all numbers are candidates.
                same = (
                    keys if shift == 64 - _BITS else keys[keys >> np.uint64(shift + _BITS) == found]
                )
                part = (same >> np.uint64(shift)) & np.uint64((1 << _BITS) - 1)
                counts += np.bincount(part.astype(np.int64), minlength=1 << _BITS)
            below = np.cumsum(counts)
            digit = int(np.searchsorted(below, place, side="right"))
            place -= int(below[digit - 1]) if digit else 0
            found = found << _BITS | digit
        return float(_float(np.array([found], np.uint64))[0])

    def _keys(self) -> Iterator[NDArray[np.uint64]]:
        with self._path.open("rb") as file:
            while chunk := file.read(8 * _CHUNK):
                bits = np.frombuffer(chunk, np.uint64)
                yield np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _float(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN, keys & ~_SIGN, ~keys).view(np.float64)


# Numbers out of range


class Range(ColumnStep):
    """Limits on numbers: drop, clip or empty values outside. Missing values are always within."""

    kind: Literal["range"] = "range"
    min: float | None = None
    max: float | None = None
    how: Literal["drop", "clip", "missing"] = "drop"

    types: ClassVar[str] = "numbers"

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.min is None and self.max is None:
            raise SettingError("step range: set min, max or both", "min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SettingError(f"step range: min {self.min} is above max {self.max}", "min", "max")
        return self

    def fits(self, kind: pa.DataType) -> bool:
        return is_number(kind)

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        for name in self.columns:
            if self.how == "clip" and pa.types.is_integer(names[name]):
                self._check_limits(name, names[name])
        return after

    def _check_limits(self, name: str, kind: pa.DataType) -> None:
        """Refuse to clip integers to a limit outside the range of their type."""
        known = np.iinfo(kind.to_pandas_dtype())
        for word, limit, beyond in (
            ("min", self.min, self.min is not None and self.min > known.max),
            ("max", self.max, self.max is not None and self.max < known.min),
        ):
            if beyond:
                raise DataError(
                    f"step range: {word} = {limit:g}: column {name!r} is of type {kind}, from "
                    f"{known.min} to {known.max}; change it first with a step types"
                )

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        reasons: dict[int, str] = {}
        changed = 0
        for name in self.columns:
            column = block.column(name)
            for gone, limit, word in self._outside(column):
                if self.how == "drop":
                    for row in np.flatnonzero(gone).tolist():
                        reason = f"{name!r} is {column[row].as_py()}: {word} {limit:g}"
                        reasons.setdefault(row, reason)
                elif gone.any():
                    changed += int(gone.sum())
                    value = self._stand_in(column.type, limit, word)
                    column = pc.if_else(pa.array(gone), value, column)
                    block = replaced(block, name, column)
        return without(block, reasons, changed=changed)

    def _outside(self, column: Any) -> Iterator[tuple[NDArray[np.bool_], float, str]]:
        """Yield, for each limit: the mask of values beyond it, the limit, a word for reasons."""
        wide = column.cast(pa.float64(), safe=False)
        if self.min is not None:
            yield mask(pc.less(wide, self.min)), self.min, "below"
        if self.max is not None:
            yield mask(pc.greater(wide, self.max)), self.max, "above"

    def _stand_in(self, kind: pa.DataType, limit: float, word: str) -> Any:
        if self.how == "missing":
            return pa.scalar(None, kind)
        if pa.types.is_integer(kind):
            limit = math.ceil(limit) if word == "below" else math.floor(limit)
        return pa.scalar(limit, kind)


# Types


class Types(ColumnStep):
    """Change the type of columns. Values that do not fit are dropped with their record, or missing.

    Texts that become another type are trimmed first, and an empty text is missing.
    """

    kind: Literal["types"] = "types"
    to: str
    how: Literal["drop", "missing"] = "drop"

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        kind = arrow_type("step types: to", self.to)
        return super().check(names) | dict.fromkeys(self.columns, kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        kind = arrow_type("step types: to", self.to)
        reasons: dict[int, str] = {}
        emptied = 0
        for name in self.columns:
            column = block.column(name)
            if is_text(column.type) and not is_text(kind):
                column = pc.utf8_trim_whitespace(column)
                empty = pc.equal(pc.binary_length(column), 0)
                column = pc.if_else(empty, pa.scalar(None, column.type), column)
            fitted, wrong = fit(column, kind)
            if self.how == "drop":
                for row in np.flatnonzero(wrong).tolist():
                    reason = f"{name!r} is {column[row].as_py()!r}: not of type {self.to}"
                    reasons.setdefault(row, reason)
            emptied += int(wrong.sum())
            block = replaced(block, name, fitted)
        return without(block, reasons, emptied=emptied if self.how == "missing" else 0)


# Lengths of texts and lists


class Length(ColumnStep):
    """Limits on the length of texts and lists; missing values have no length and are kept."""

    kind: Literal["length"] = "length"
    min: Annotated[int, Field(ge=0)] | None = None
    max: Annotated[int, Field(ge=1)] | None = None
    too_long: Literal["drop", "cut"] = "drop"

    types: ClassVar[str] = "text or a list"

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.min is None and self.max is None:
            raise SettingError("step length: set min, max or both", "min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SettingError(f"step length: min {self.min} is above max {self.max}", "min", "max")
        return self

    def fits(self, kind: pa.DataType) -> bool:
        return is_text(kind) or _is_list(kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        reasons: dict[int, str] = {}
        cut = 0
        for name in self.columns:
            column = block.column(name)
            lengths = _lengths(column)
            if self.min is not None:
                self._note(reasons, name, lengths, lengths < self.min, f"fewer than {self.min}")
            if self.max is not None:
                long = lengths > self.max
                if self.too_long == "drop":
                    self._note(reasons, name, lengths, long, f"more than {self.max}")
                elif long.any():
                    cut += int(long.sum())
                    block = replaced(block, name, _cut(column, self.max))
        return without(block, reasons, cut=cut)

    def _note(
        self,
        reasons: dict[int, str],
        name: str,
        lengths: NDArray[np.int64],
        gone: NDArray[np.bool_],
        what: str,
    ) -> None:
        for row in np.flatnonzero(gone & (lengths >= 0)).tolist():
            reasons.setdefault(row, f"{name!r} has a length of {lengths[row]}: {what}")


def _lengths(column: Any) -> NDArray[np.int64]:
    """Return lengths in characters or items, −1 for missing values."""
    text = is_text(column.type)
    lengths = pc.utf8_length(column) if text else pc.list_value_length(column)
    return np.asarray(lengths.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _cut(column: Any, most: int) -> Any:
    if is_text(column.type):
        return pc.utf8_slice_codeunits(column, 0, most)
    return pc.list_slice(column, 0, most, return_fixed_size_list=False).cast(column.type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


# Normal form of texts


class Text(ColumnStep):
    """Normalize columns of text. Each setting is one change, applied in the order below."""

    kind: Literal["text"] = "text"
    html: bool = False
    """Remove tags, comments and scripts, and replace entities such as `&amp;` by characters."""
    unicode: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC"
    """The Unicode normal form; the K forms also merge variants of a character."""
    width: bool = False
    """Replace full-width letters, digits and punctuation, as in Chinese text, by ASCII ones."""
    lower: bool = False
    space: bool = True
    """Replace runs of blanks, line ends and control characters by one space; trim both ends."""

    types: ClassVar[str] = "text"

    def fits(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        changed = 0
        for name in self.columns:
            before = block.column(name)
            after = self.normalised(before)
            changed += pc.sum(pc.not_equal(before, after)).as_py() or 0
            block = replaced(block, name, after)
        return Cleaned(block, counts={"changed": changed})

    def normalised(self, text: Any) -> Any:
        if self.html:
            text = plain(text)
        if self.unicode:
            form = self.unicode
            other = pc.invert(pc.string_is_ascii(text))  # ASCII has only one form
            text = _changed(text, other, lambda some: pc.utf8_normalize(some, form))
        if self.width:
            text = narrowed(text)
        if self.lower:
            text = pc.utf8_lower(text)
        if self.space:
            odd = pc.match_substring_regex(text, _ODD_BLANK)
            text = _changed(text, odd, lambda some: pc.replace_substring_regex(some, _BLANKS, " "))
            text = pc.utf8_trim_whitespace(text)
        return text


# Any blank other than a single plain space. Most texts have none and are not touched.
_ODD_BLANK = r"[^\P{Z} ]|\p{Cc}|[\s\p{Z}]{2}"
_BLANKS = r"[\s\p{Z}\p{Cc}]+"


def _changed(text: Any, where: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the rows `where`, and return the column with the other rows unchanged."""
    if not pc.any(where).as_py():
        return text
    return pc.replace_with_mask(text, where.fill_null(False), change(text.filter(where)))


def plain(text: Any) -> Any:
    """Remove markup. A tag separates words, so a space replaces it."""
    text = _changed(text, pc.match_substring(text, "<"), _untagged)
    return _changed(text, pc.match_substring(text, "&"), _unescaped)


def _untagged(text: Any) -> Any:
    return pc.replace_substring_regex(pc.replace_substring_regex(text, _HIDDEN, " "), _TAG, " ")


_HIDDEN = r"(?is)<!--.*?-->|<script\b.*?</script\s*>|<style\b.*?</style\s*>"
_TAG = r"</?[a-zA-Z][^<>]*>"


def _unescaped(text: Any) -> Any:
    return pa.array([html.unescape(one) for one in text.to_pylist()], text.type)


def narrowed(text: Any) -> Any:
    """Replace full-width characters (U+FF01 … U+FF5E and U+3000) by their ASCII counterparts.

    Works on the bytes of the whole column: in UTF-8 each of these characters is three bytes, and
    becomes one.
    """
    if pc.all(pc.string_is_ascii(text)).as_py():
        return text
    text = text.cast(pa.large_utf8())
    _, places, buffer = text.buffers()
    offsets = np.frombuffer(places, np.int64, len(text) + 1, 8 * text.offset)
    if buffer is None or offsets[-1] == offsets[0]:
        return text
    values = np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]].copy()
    offsets = offsets - offsets[0]
    at = np.flatnonzero((values[:-2] == 0xEF) | (values[:-2] == 0xE3))
    first, second, third = (values[at + n] for n in range(3))
    low = (first == 0xEF) & (second == 0xBC) & (third >= 0x81)
    high = (first == 0xEF) & (second == 0xBD) & (third <= 0x9E)
    blank = (first == 0xE3) & (second == 0x80) & (third == 0x80)
    chosen = low | high | blank
    wide = at[chosen]
    if not len(wide):
        return text
    values[wide] = np.where(low, third - 0x60, np.where(high, third - 0x20, 0x20))[chosen]
    kept = np.ones(len(values), np.bool_)
    kept[wide + 1] = kept[wide + 2] = False
    offsets = offsets - 2 * np.searchsorted(wide, offsets)
    arrays = [text.is_valid() if text.null_count else None, offsets, values[kept]]
    return _rebuilt(len(text), *arrays)


def _rebuilt(rows: int, present: Any, offsets: Any, values: Any) -> Any:
    whole = pa.Array.from_buffers(
        pa.large_utf8(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    )
    return whole if present is None else pc.if_else(present, whole, pa.scalar(None, whole.type))
