"""Records that are not used, each with its place and the reason: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

READ, FILE = "read", "file"
"""What cannot be read: records; what is left of a file, from there on."""
_SHOWN = 500
"""Characters of a record that are shown."""


@dataclass(frozen=True, slots=True)
class Out:
    """Something that is not used."""

    file: str
    line: int
    reason: str
    record: str
    step: str
    records: int = 1
    """How many records it stands for: 0 where it is about a stream as a whole."""

    def to_line(self) -> bytes:
        plain: dict[str, Any] = {
            "file": self.file,
            "line": self.line,
            "step": self.step,
            "reason": self.reason,
        }
        if self.records != 1:
            plain["records"] = self.records
        return json.dumps(plain | {"record": self.record}, ensure_ascii=False).encode() + b"\n"


def told(
    place: Callable[[int], tuple[str, int]],
    block: pa.RecordBatch,
    rows: Sequence[tuple[int, str]],
    step: str,
) -> list[Out]:
    """These rows of a block, each with its place and its reason."""
    return [Out(*place(row), reason, _shown(block, row), step) for row, reason in rows]


def text_of(outs: Iterable[Out]) -> bytes:
    return b"".join(out.to_line() for out in outs)


def cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def counted(outs: Iterable[Out]) -> dict[str, int]:
    """How many records each step took out."""
    counts: dict[str, int] = {}
    for out in outs:
        counts[out.step] = counts.get(out.step, 0) + out.records
    return counts


def added(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        totals[name] = totals.get(name, 0) + count


def _shown(block: pa.RecordBatch, row: int) -> str:
    values = {name: _plain(block.column(name)[row]) for name in block.schema.names}
    return cut(json.dumps(values, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    plain = value.as_py()
    if isinstance(plain, bytes):
        return f"{len(plain)} bytes"
    return cut(plain) if isinstance(plain, str) else plain


def first(outs: Iterable[Out]) -> Iterator[str]:
    """Of the first one, where it is and why, on one line."""
    for out in outs:
        yield f"{out.file}:{out.line}: {out.reason}"
        return
