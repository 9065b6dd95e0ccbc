"""libsvm and svmlight: `label index:value index:value … # comment` on every line.

Both readers parse lines with `read_rows`, a pass of array operations in which Arrow converts all
numbers at once. The block parser (`cut`, `count`, `infer`, `parse`) serves recipes; the strict
reader `read_libsvm` serves jobs without a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.formats import scan
from echelon.data.formats.cutting import cut_into_lines
from echelon.data.formats.records import Block, Parsed, Sieve, Source, conform, lacking, whole_block
from echelon.data.formats.streams import open_stream
from echelon.data.shards.encode import WIDTH

LABEL, FEATURES = "label", "features"
_PAIRS = pa.large_list(pa.struct([("index", pa.int32()), ("value", pa.float32())]))


# Block parser


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_into_lines(source, size)


def count(block: Block) -> int:
    return len(_spans(uncommented(block.content())).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    return libsvm_schema(block.source.options.width)


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    if reason := lacking(wanted, libsvm_schema(None).names):
        return whole_block(block, wanted, reason, count(block))
    options = block.source.options
    width, zero_based = options.width, options.zero_based
    data = uncommented(block.content())
    spans = _spans(data)

    def read(joined: bytes) -> Any | None:
        rows = read_rows(joined, width, zero_based)
        return None if rows is None else pa.record_batch(rows.columns())

    batch = read(data)
    if batch is None or batch.num_rows != len(spans.starts):
        sieve = Sieve(data, spans, read, lambda record: refusal(record, width, zero_based))
        parsed = sieve.parsed(block, libsvm_schema(None))
    else:
        parsed = Parsed(batch, block.record + spans.lines)
    columns = dict(zip(parsed.batch.schema.names, parsed.batch.columns, strict=True))
    return conform(block, columns, parsed.lines, wanted, parsed.bad)


def _spans(data: bytes) -> scan.Spans:
    return scan.nonblank(data, scan.spans(data, None, False))


# Strict reader


def read_libsvm(path: Path, *, width: int | None = None, zero_based: bool = False) -> Iterator[Any]:
    """Yield record batches with `label` and the sparse `features`.

    Without a `width` the file is read twice, first to find the largest index. Indices count from 1
    unless `zero_based`.
    """
    if width is None:
        tops = (rows.indices.max(initial=-1) for rows in _rows(path, None, zero_based))
        width = max(1, 1 + max(int(top) for top in tops))
    schema = libsvm_schema(width)
    for rows in _rows(path, width, zero_based):
        yield pa.RecordBatch.from_arrays(list(rows.columns().values()), schema=schema)


def _rows(path: Path, width: int | None, zero_based: bool) -> Iterator[Rows]:
    line, some = 1, False
    with open_stream(path) as stream:
        while lines := stream.readlines(_BLOCK):
            data = uncommented(b"".join(lines))
            rows = read_rows(data, width, zero_based)
            if rows is None:
                raise DataError(_first_fault(path, line, data, width, zero_based))
            line += len(lines)
            if len(rows.labels):
                some = True
                yield rows
    if not some:
        raise DataError(f"{path}: empty")


_BLOCK = 16 << 20
"""Bytes that the strict reader parses at a time."""


def _first_fault(path: Path, line: int, data: bytes, width: int | None, zero_based: bool) -> str:
    for number, record in enumerate(data.splitlines(), line):
        if record.strip() and (fault := refusal(record, width, zero_based)):
            return f"{path}:{number}: {fault}"
    return f"{path}:{line}: a line from here on cannot be read"


# Parsing, for both readers


def libsvm_schema(width: int | None) -> Any:
    about = None if width is None else {WIDTH: str(width)}
    return pa.schema([pa.field(LABEL, pa.float64()), pa.field(FEATURES, _PAIRS, metadata=about)])


class Rows(NamedTuple):
    """Rows of a sparse matrix (CSR), and the label of each."""

    labels: NDArray[np.float64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def columns(self) -> dict[str, Any]:
        entries = pa.StructArray.from_arrays(
            [pa.array(self.indices), pa.array(self.values)], ["index", "value"]
        )
        pairs = pa.LargeListArray.from_arrays(pa.array(self.offsets), entries)
        return {LABEL: pa.array(self.labels), FEATURES: pairs}


def uncommented(data: bytes) -> bytes:
    """Remove comments and replace tabs by spaces; the number of lines stays the same."""
    if b"#" in data:
        data = _COMMENT.sub(b" ", data)  # a blank keeps a \r before it apart from the \n after it
    return data.translate(_TABS)


_COMMENT = re.compile(rb"[ \t]*#[^\r\n]*")
_TABS = bytes.maketrans(b"\t", b" ")


def read_rows(data: bytes, width: int | None, zero_based: bool) -> Rows | None:
    """Parse lines without comments; return None if one of them is bad.

    A mask over the bytes separates labels from pairs: the label ends at a line's first space, and
    each pair becomes a line `index:value` of its own. Arrow's csv parser then converts all labels
    in one call and all pairs in another.
    """
    if b"\r" in data or b"\n " in data or b" \n" in data or data[:1] == b" ":
        data = _BLANKS.sub(rb"\1", data.strip(b" ")).replace(b"\r\n", b"\n")
    if data and not data.endswith(b"\n"):
        data += b"\n"
    bytes_ = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(bytes_ == _FEED)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return Rows(
            np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(1, np.int64)
        )
    spaces = np.append(np.flatnonzero(bytes_ == _SPACE), len(bytes_))
    stops = np.minimum(spaces[np.searchsorted(spaces, starts)], ends)
    edges = np.zeros(len(bytes_), np.int8)
    edges[starts] = 1
    edges[stops] -= 1
    in_label = np.cumsum(edges, dtype=np.int8).view(np.bool_)
    colons = np.flatnonzero(bytes_ == _COLON)
    offsets = np.append(np.searchsorted(colons, starts), len(colons)).astype(np.int64)
    labels = _table(bytes_[in_label | (bytes_ == _FEED)].tobytes(), {LABEL: pa.float64()})
    pairs = _table(
        bytes_[~in_label].tobytes().replace(b" ", b"\n"),
        {"index": pa.int64(), "value": pa.float32()},
    )
    if labels is None or pairs is None:
        return None
    if labels.num_rows != len(starts) or pairs.num_rows != len(colons):
        return None
    indices = pairs.column("index").to_numpy() - (not zero_based)
    top = (width or 2**31 - 1) - 1
    if len(indices) and (indices.min() < 0 or indices.max() > top):
        return None
    return Rows(
        labels.column(LABEL).to_numpy(),
        indices.astype(np.int32),
        pairs.column("value").to_numpy(),
        offsets,
    )


_BLANKS = re.compile(rb"[ \t]*(\r?\n)[ \t]*")
_SPACE, _FEED, _COLON = ord(" "), ord("\n"), ord(":")


def _table(data: bytes, types: dict[str, Any]) -> Any | None:
    if not data.strip(b"\n"):
        return pa.table({name: pa.array([], kind) for name, kind in types.items()})
    try:
        return pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(column_names=list(types), block_size=1 << 18, use_threads=False),
            pa.csv.ParseOptions(delimiter=":", quote_char=False),
            pa.csv.ConvertOptions(column_types=types, null_values=[]),
        )
    except pa.ArrowInvalid:
        return None


def refusal(record: bytes, width: int | None, zero_based: bool) -> str | None:
    """Return the reason why a line without comments is bad, or None if it is good."""
    if read_rows(record, width, zero_based) is not None:
        return None
    label, *pairs = record.split()
    if read_rows(label, width, zero_based) is None:
        return f"label {_shown(label)} is not a number"
    for pair in pairs:
        if read_rows(b"0 " + pair, None, True) is None:
            return f"{_shown(pair)} is not `index:value`"
        if read_rows(b"0 " + pair, width, zero_based) is None:
            first = 0 if zero_based else 1
            most = f" to {width - 1 + first}" if width else ""
            return f"index of {_shown(pair)}: indices go from {first}{most}"
    return "it cannot be read"


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace")[:60])
