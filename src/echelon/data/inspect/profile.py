"""What was found out about data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.core.format import shown
from echelon.data.inspect.sketches import Count, Figures


@dataclass(frozen=True, slots=True)
class Profile:
    """All parts of what was looked at."""

    path: str
    parts: tuple[PartProfile, ...]
    seconds: float
    preparation: str | None = None
    """How the data was prepared, where Echelon did it."""

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


_TOLD = 5


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be read."""

    records: int = 0
    faults: tuple[str, ...] = ()
    """The first of them, each with file, line and reason."""
    more: int = 0
    """How many faults are not told."""

    def and_(self, fault: str, records: int) -> Unread:
        records += self.records
        if len(self.faults) < _TOLD:
            return Unread(records, (*self.faults, fault), self.more)
        return Unread(records, self.faults, self.more + 1)

    def lines(self) -> list[str]:
        """How many records, and the first faults."""
        if not self.faults:
            return []
        more = [f"and {self.more:,} more"] if self.more else []
        what = (
            f"{self.records:,} record{'s' * (self.records != 1)}" if self.records else "something"
        )
        return [f"{what} cannot be read", *self.faults, *more]


@dataclass(frozen=True, slots=True)
class PartProfile:
    """One part of the data: a file, a folder, or train, valid and test."""

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
        """How many records each class has; None without a label, or with a label of numbers."""
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
"""So many different numbers are classes rather than an amount."""


@dataclass(frozen=True, slots=True)
class ColumnProfile:
    """One column. What does not apply to its kind is None."""

    name: str
    kind: str
    """number, text, time, sequence, sparse, tensor, empty or other."""
    type: str
    records: int
    missing: int
    blank: int | None = None
    """Texts that say nothing: empty, ?, NA and their like."""
    distinct: Count | None = None
    counts: dict[Any, int] | None = None
    """How often each value occurs, the most frequent first, where they are few."""
    numbers: Figures | None = None
    """Of numbers, of the values of sequences, of the pixels of images."""
    lengths: Figures | None = None
    """Characters of texts, items of sequences, entries of sparse rows."""
    words: Figures | None = None
    """Words of texts, between spaces; of a sample of them."""
    shape: tuple[int, ...] | None = None
    channels: tuple[tuple[float, float], ...] | None = None
    """Mean and deviation of each channel of images."""
    span: tuple[str, str] | None = None
    """The first and the last time."""

    @property
    def present(self) -> int:
        return self.records - self.missing

    @property
    def nothing(self) -> int:
        """Records that have no value here, or a text that says nothing."""
        return self.missing + (self.blank or 0)

    @property
    def unit(self) -> str:
        """What its lengths are counted in."""
        return _UNITS.get(self.kind, "")

    @property
    def is_category(self) -> bool:
        """Whether its values say more than a histogram: few numbers, or words that come again."""
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
    """One record and its number, counted from 0."""

    record: int
    values: dict[str, Any]
    """Plain values, and arrays for what is shaped."""


def top(counts: dict[Any, int], most: int) -> list[tuple[Any, int]]:
    return list(counts.items())[:most]


def told(count: Count) -> str:
    """A number of different values; an estimate says that it is one."""
    return f"{count.value:,}" if count.exact else f"≈ {count.value:,}"
