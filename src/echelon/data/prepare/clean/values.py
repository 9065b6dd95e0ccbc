"""Missing, range, types, length, text."""

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

# --- missing ---
# Values that are missing: records go, or something stands in for them.

SUFFIX = "_missing"
"""What an indicator's name ends in."""


class Missing(ColumnStep):
    """What becomes of records without a value: a null, NaN, or a text with nothing in it.

    Numbers that a mean, a median or a fraction stands in for become float64.
    """

    kind: Literal["missing"] = "missing"
    how: Literal["drop", "constant", "mean", "median"] = "drop"
    value: bool | int | float | str | None = None
    """What stands in, with how: constant."""
    indicator: bool = False
    """Add a column `<column>_missing` that says where a value was missing."""

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
        """The type of a column after it: whole numbers have no room for a fraction."""
        fraction = isinstance(self.value, float) and self.value % 1 > 0
        return pa.float64() if self.looks or (fraction and pa.types.is_integer(kind)) else kind

    def _constant(self, name: str, kind: pa.DataType) -> Any:
        """The value as one of the column's own; Arrow would cut some, and make others infinite."""
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
    """Whether it is still that number, as near as its type has one."""
    return is_number(value.type) and math.isinf(value.as_py()) == math.isinf(number)


def _floats(column: Any) -> Any:
    """The nearest ones: not every whole number beyond 2^53 is one."""
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


# --- range ---
# Numbers that are out of range.


class Range(ColumnStep):
    """Limits on numbers; what is missing is within every range."""

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
        """Nothing can be moved to a limit that the type has no number for."""
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
                        told = f"{name!r} is {column[row].as_py()}: {word} {limit:g}"
                        reasons.setdefault(row, told)
                elif gone.any():
                    changed += int(gone.sum())
                    value = self._stand_in(column.type, limit, word)
                    column = pc.if_else(pa.array(gone), value, column)
                    block = replaced(block, name, column)
        return without(block, reasons, changed=changed)

    def _outside(self, column: Any) -> Iterator[tuple[NDArray[np.bool_], float, str]]:
        """Which values are beyond which limit."""
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


# --- types ---
# Columns of one type as columns of another: what does not fit is dropped, or missing.


class Types(ColumnStep):
    """Change the type of columns. Texts are trimmed first, and an empty one is missing."""

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
                    told = f"{name!r} is {column[row].as_py()!r}: not of type {self.to}"
                    reasons.setdefault(row, told)
            emptied += int(wrong.sum())
            block = replaced(block, name, fitted)
        return without(block, reasons, emptied=emptied if self.how == "missing" else 0)


# --- length ---
# Texts and lists that are too short or too long.


class Length(ColumnStep):
    """Limits on the length of a text or a list; what is missing has none."""

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
    """In characters or items; −1 where the value is missing."""
    text = is_text(column.type)
    lengths = pc.utf8_length(column) if text else pc.list_value_length(column)
    return np.asarray(lengths.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _cut(column: Any, most: int) -> Any:
    if is_text(column.type):
        return pc.utf8_slice_codeunits(column, 0, most)
    return pc.list_slice(column, 0, most, return_fixed_size_list=False).cast(column.type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


# --- text ---
# Text as it should be: no mark-up, one form of every character, single spaces.

_HIDDEN = r"(?is)<!--.*?-->|<script\b.*?</script\s*>|<style\b.*?</style\s*>"
_TAG = r"</?[a-zA-Z][^<>]*>"
_BLANKS = r"[\s\p{Z}\p{Cc}]+"
# Any blank that is not a single plain space: most texts have none, and are left as they are.
_ODD_BLANK = r"[^\P{Z} ]|\p{Cc}|[\s\p{Z}]{2}"


class Text(ColumnStep):
    """Normalise a column of text; every setting is one thing done, in the order they stand here."""

    kind: Literal["text"] = "text"
    html: bool = False
    """Take out tags, comments and scripts, and put the characters that `&amp;` and its kin mean."""
    unicode: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC"
    """Which of several ways to write a character is used; the K forms also merge variants."""
    width: bool = False
    """Full-width letters, digits and marks, as Chinese text has them, become plain ones."""
    lower: bool = False
    space: bool = True
    """Runs of blanks, line ends and control characters become one space, none at the ends."""

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
            other = pc.invert(pc.string_is_ascii(text))  # plain characters have one form alone
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


def _changed(text: Any, where: Any, change: Callable[[Any], Any]) -> Any:
    """The column with these rows changed, the others as they are."""
    if not pc.any(where).as_py():
        return text
    return pc.replace_with_mask(text, where.fill_null(False), change(text.filter(where)))


def plain(text: Any) -> Any:
    """Without mark-up; a tag parts words, so a space stands for it."""
    text = _changed(text, pc.match_substring(text, "<"), _untagged)
    return _changed(text, pc.match_substring(text, "&"), _unescaped)


def _untagged(text: Any) -> Any:
    return pc.replace_substring_regex(pc.replace_substring_regex(text, _HIDDEN, " "), _TAG, " ")


def _unescaped(text: Any) -> Any:
    return pa.array([html.unescape(one) for one in text.to_pylist()], text.type)


def narrowed(text: Any) -> Any:
    """Full-width forms, U+FF01 … U+FF5E and U+3000, as the ASCII characters they are wide forms of.

    All of a block at once: in UTF-8 each is three bytes, of which one stays.
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


# --- median ---
# The exact median of more numbers than fit into memory.

_BITS = 16
_CHUNK = 1 << 20
_SIGN = np.uint64(1 << 63)


class Median:
    """Numbers go to a file; the one in the middle is found by its bits, sixteen at a time.

    Floats sort like their bits as whole numbers, once the negative ones are turned round. Four
    times over the file: how many numbers have which next sixteen bits says in which of them the
    middle is.
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
        """The middle one, or the mean of the two in the middle; None of nothing."""
        if not self._count:
            return None
        low, high = self._at((self._count - 1) // 2), self._at(self._count // 2)
        middle = (low + high) / 2  # rounded once: a difference would be rounded too
        return middle if np.isfinite(middle) else low / 2 + high / 2

    def _at(self, place: int) -> float:
        """The number that would stand at this place if all were in order."""
        found = 0
        for shift in range(64 - _BITS, -1, -_BITS):
            counts = np.zeros(1 << _BITS, np.int64)
            for keys in self._keys():
                # Shifting by all 64 bits is not defined: at first all are alike.
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
