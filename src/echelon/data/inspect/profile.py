"""The result of `inspect()`: a profile of the data, its parts and their columns.

    Profile ─ PartProfile (one per file, folder or split) ─┬─ ColumnProfile (one per column)
                                                           ├─ Example (a few records)
                                                           └─ Unread (bad records)

The classes hold data only. `as_data` gives plain JSON data; the terminal view is in
`echelon.cli.data`, the page in `echelon.data.inspect.html`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.core.format import shown
from echelon.data.inspect.sketches import Count, Figures


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a file or folder."""

    path: str
    parts: tuple[PartProfile, ...]
    seconds: float
    preparation: str | None = None
    """How the data was prepared, if Echelon prepared it."""

    @property
    def records(self) -> int:
        return sum(part.records for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def as_data(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "records": self.records,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "preparation": self.preparation,
            "parts": [part.as_data() for part in self.parts],
        }


_MOST_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Unread:
    """The records that could not be read."""

    records: int = 0
    faults: tuple[str, ...] = ()
    """The first faults, each with file, line and reason."""
    more: int = 0
    """How many further faults there were."""

    def and_(self, fault: str, records: int) -> Unread:
        """Return this with one more fault, which concerns so many records."""
        records += self.records
        if len(self.faults) < _MOST_FAULTS:
            return Unread(records, (*self.faults, fault), self.more)
        return Unread(records, self.faults, self.more + 1)

    def lines(self) -> list[str]:
        """Return lines for the user: how many records, and the first faults."""
        if not self.faults:
            return []
        more = [f"and {self.more:,} more"] if self.more else []
        what = (
            f"{self.records:,} record{'s' * (self.records != 1)}" if self.records else "something"
        )
        return [f"{what} cannot be read", *self.faults, *more]


@dataclass(frozen=True, slots=True)
class PartProfile:
    """One part of the data: a file, a folder, or a split such as train."""

    name: str
    format: str
    files: int
    bytes: int
    records: int
    columns: tuple[ColumnProfile, ...]
    label: str | None
    examples: tuple[Example, ...]
    unread: Unread = Unread()

    def column(self, name: str) -> ColumnProfile:
        return next(column for column in self.columns if column.name == name)

    @property
    def balance(self) -> dict[Any, int] | None:
        """How many records each class has; None without a label or if it has too many values."""
        return self.column(self.label).counts if self.label is not None else None

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "format": self.format,
            "files": self.files,
            "bytes": self.bytes,
            "records": self.records,
            "unread": {"records": self.unread.records, "faults": list(self.unread.faults)},
            "columns": [column.as_data() for column in self.columns],
            "label": self.label,
            "classes": None
            if self.balance is None
            else [[value, count] for value, count in self.balance.items()],
            "examples": [
                {"record": example.record}
                | {"values": {name: shown(value) for name, value in example.values.items()}}
                for example in self.examples
            ],
        }


_UNITS = {"text": "characters", "bytes": "bytes", "sequence": "items", "sparse": "entries"}
_FEW = 12
"""A numeric column with at most so many distinct values is a category."""


@dataclass(frozen=True, slots=True)
class ColumnProfile:
    """One column. Fields that do not apply to its kind are None."""

    name: str
    kind: str
    """number, text, bytes, time, sequence, sparse, tensor, empty or other."""
    type: str
    records: int
    missing: int
    blank: int | None = None
    """Texts that mean "no value": empty, ?, NA and similar."""
    distinct: Count | None = None
    counts: dict[Any, int] | None = None
    """How often each value occurs, the most frequent first; None if there are too many."""
    numbers: Figures | None = None
    """Statistics of numbers, of the values of sequences, or of the pixels of images."""
    lengths: Figures | None = None
    """Statistics of the characters per text, items per sequence, or entries per sparse row."""
    words: Figures | None = None
    """Statistics of the words per text, for a sample of the texts."""
    shape: tuple[int, ...] | None = None
    channels: tuple[tuple[float, float], ...] | None = None
    """Mean and standard deviation of each channel of images."""
    span: tuple[str, str] | None = None
    """The earliest and the latest time."""

    @property
    def present(self) -> int:
        return self.records - self.missing

    @property
    def nothing(self) -> int:
        """Records without a value, including blank texts."""
        return self.missing + (self.blank or 0)

    @property
    def unit(self) -> str:
        """The unit of `lengths`."""
        return _UNITS.get(self.kind, "")

    @property
    def is_category(self) -> bool:
        """Whether to show values instead of a histogram: few numbers, or repeated texts."""
        if not self.counts:
            return False
        most = _FEW if self.kind == "number" else max(_FEW, self.present // 4)
        return len(self.counts) <= min(most, self.present - 1)

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "kind": self.kind, "type": self.type}
        data |= {"records": self.records, "missing": self.missing}
        if self.distinct is not None:
            data["distinct"] = {"count": self.distinct.value, "exact": self.distinct.exact}
        if self.counts is not None:
            data["values"] = [[value, count] for value, count in top(self.counts, 20)]
        for name in ("blank", "shape", "channels", "span"):
            if getattr(self, name) is not None:
                data[name] = getattr(self, name)
        for name in ("numbers", "lengths", "words"):
            figures = getattr(self, name)
            if figures is not None:
                data[name] = figures.as_data()
        return data


@dataclass(frozen=True, slots=True)
class Example:
    """One record and its number, from 0."""

    record: int
    values: dict[str, Any]
    """Plain values, and numpy arrays for tensors."""


def top(counts: dict[Any, int], most: int) -> list[tuple[Any, int]]:
    return list(counts.items())[:most]


def told(count: Count) -> str:
    """Return a number of distinct values as text; `≈` marks an estimate."""
    return f"{count.value:,}" if count.exact else f"≈ {count.value:,}"
