"""Where records begin and end in a piece of text, quotes respected; whole arrays at a time.

A quote opens a cell only where a cell begins, and closes it only where one ends; inside, a quote
is written twice. As long as a piece keeps to that, every second quote closes, and a line ends
where an even number of quotes came before. A piece that does not is read with care: line by line,
and a line whose quotes do not match is a bad record by itself, the next one begins after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

QUOTE, FEED, RETURN = 34, 10, 13
Places: TypeAlias = NDArray[np.int64]
_PART = 1 << 18  # what is compared at a time stays in the cache


class Spans(NamedTuple):
    """Records of a piece that are not empty: their bytes without the line's end, their line."""

    starts: Places
    ends: Places
    lines: Places
    """Counted from 0."""
    broken: NDArray[np.bool_]
    """Whether its quotes do not match."""


def places(data: bytes, byte: int) -> Places:
    """Where this byte is."""
    values = np.frombuffer(data, np.uint8)
    parts = [
        np.flatnonzero(values[start : start + _PART] == byte) + start
        for start in range(0, len(values), _PART)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def lines_in(data: bytes) -> int:
    """How many lines end in it, with a line feed, a carriage return or both."""
    values = np.frombuffer(data, np.uint8)
    count = sum(
        int(np.count_nonzero(values[start : start + _PART] == FEED))
        for start in range(0, len(values), _PART)
    )
    return count + _lone_returns(data)


def _lone_returns(data: bytes) -> int:
    return data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0


def cut_lines(data: bytes, last: bool) -> int:
    """Where the last whole line ends; 0 if there is none."""
    if last:
        return len(data)
    end = data.rfind(b"\n") + 1
    # Only returns, as old machines wrote them; the last byte may be half of a pair.
    return end or data.rfind(b"\r", 0, len(data) - 1) + 1


def cut_quoted(data: bytes, last: bool, delimiter: str) -> tuple[int, bool]:
    """Where the last whole record ends, and whether the piece is to be read with care."""
    quotes = places(data, QUOTE)
    if not len(quotes):
        return cut_lines(data, last), False
    if _regular(data, quotes, delimiter) and not (last and len(quotes) % 2):
        return len(data) if last else _last_end(data, quotes), False
    if last:
        return len(data), True
    found = careful(data, delimiter, last)
    return _after(data, int(found.ends[-1])) if len(found.ends) else 0, True


def first_line(data: bytes) -> int:
    """Where the first line ends, whatever its quotes say; 0 if it goes on."""
    found = re.search(rb"\r\n|\n|\r(?!\Z)", data)
    return found.end() if found else 0


def spans(data: bytes, delimiter: str | None, odd: bool) -> Spans:
    """All records; `delimiter` only where there are quotes, `odd` if they are to be read with care.

    `data` ends where a record does.
    """
    if odd or not data or _lone_returns(data):
        return careful(data, delimiter, True)
    feeds = places(data, FEED)
    ends = feeds
    if delimiter is not None and b'"' in data:
        ends = feeds[np.searchsorted(places(data, QUOTE), feeds) % 2 == 0]
    starts = np.concatenate([[0], ends + 1])
    ends = np.concatenate([ends, [len(data)]])
    values = np.frombuffer(data, np.uint8)
    trimmed = ends - ((ends > starts) & (values[np.maximum(ends, 1) - 1] == RETURN))
    kept = trimmed > starts
    starts, trimmed = starts[kept], trimmed[kept]
    lines = np.searchsorted(feeds, starts)
    return Spans(starts, trimmed, lines, np.zeros(len(starts), np.bool_))


def nonblank(data: bytes, found: Spans) -> Spans:
    """Without the records that are nothing but blanks."""
    kept = np.ones(len(found.starts), np.bool_)
    values = np.frombuffer(data, np.uint8)
    for row in np.flatnonzero(values[found.starts] <= ord(" ")).tolist() if len(kept) else ():
        kept[row] = bool(data[found.starts[row] : found.ends[row]].strip())
    starts, ends, lines, broken = found
    return Spans(starts[kept], ends[kept], lines[kept], broken[kept])


def careful(data: bytes, delimiter: str | None, last: bool) -> Spans:
    """The same one by one, for text that does not keep to the rules."""
    rows = list(records(data, delimiter, last))
    starts, ends, lines, broken = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Spans(
        np.array(starts, np.int64),
        np.array(ends, np.int64),
        np.array(lines, np.int64),
        np.array(broken, np.bool_),
    )


def records(data: bytes, delimiter: str | None, last: bool) -> Iterator[tuple[int, int, int, bool]]:
    """Start, end, line (from 0) of each record that is not empty, and whether it is broken."""
    record, unclosed, line = _patterns(delimiter)
    at, number = 0, 0
    while at < len(data):
        found = record.match(data, at)
        if found is None and not last and unclosed.match(data, at):
            return
        broken = found is None
        match = found or line.match(data, at)
        assert match is not None, "a line always matches"
        if not last and match.end() == len(data) and not match[2].endswith(b"\n"):
            return  # the next piece may go on with this line
        if match.end(1) > at:
            yield at, match.end(1), number, broken
        number += lines_in(match[1]) + bool(match[2])
        at = match.end()


@lru_cache
def _patterns(delimiter: str | None) -> tuple[re.Pattern[bytes], ...]:
    """A record, one whose last quote is not closed before the piece ends, and any line."""
    line = rb"([^\r\n]*+)(\r\n|\n|\r|\Z)"
    if delimiter is None:
        return re.compile(line), re.compile(rb"(?!)"), re.compile(line)
    d = re.escape(delimiter.encode())
    inside = rb'"(?:[^"]++|"")*+'
    cell = rb"(?:" + inside + rb'"(?=' + d + rb'|[\r\n]|\Z)|(?!")[^' + d + rb"\r\n]*+)"
    many = rb"(?:" + cell + d + rb")*+"
    return (
        re.compile(rb"(" + many + cell + rb")(\r\n|\n|\r|\Z)"),
        re.compile(many + inside + rb'"?+\Z'),
        re.compile(line),
    )


def _regular(data: bytes, quotes: Places, delimiter: str) -> bool:
    """Whether every quote opens, closes or is one of two, taken in turns."""
    values = np.frombuffer(data, np.uint8)
    cell_ends = np.zeros(256, np.bool_)
    cell_ends[[ord(delimiter), FEED, RETURN, QUOTE]] = True
    opening, closing = quotes[::2], quotes[1::2]
    before = values[opening[opening > 0] - 1]
    after = values[closing[closing < len(values) - 1] + 1]
    return bool(cell_ends[before].all() and cell_ends[after].all())


def _last_end(data: bytes, quotes: Places) -> int:
    """Where the last line ends that does so outside of quotes; 0 if none does."""
    end = _last_outside(data, quotes, b"\n", len(data)) if b"\n" in data else 0
    # Only returns, as in `cut_lines`.
    return end or _last_outside(data, quotes, b"\r", len(data) - 1)


def _last_outside(data: bytes, quotes: Places, sign: bytes, stop: int) -> int:
    """Behind the last such byte before `stop` that is not in quotes; 0 if there is none."""
    at = len(quotes)
    if at % 2:
        at, stop = at - 1, min(stop, int(quotes[at - 1]))
    while True:
        start = int(quotes[at - 1]) + 1 if at else 0
        if (found := data.rfind(sign, start, stop)) >= 0:
            return found + 1
        if not at:
            return 0
        at, stop = at - 2, int(quotes[at - 2])


def _after(data: bytes, end: int) -> int:
    """Behind the end of the line that ends here."""
    return end + (2 if data[end : end + 2] == b"\r\n" else 1)
