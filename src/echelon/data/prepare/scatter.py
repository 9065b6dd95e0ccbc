"""A block → all its features, laid out by split and shard, ready to be gathered.

The file of a block has one record batch per shard that gets something of it, its rows in the order
they have there, with their places beside them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from echelon.data.prepare import quarantine
from echelon.data.prepare.columns import WEIGHT, Columns, Values, take, take_all
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.forms import arrow, formed, part
from echelon.data.prepare.learnt import Learnt, unpack
from echelon.data.prepare.passes import Rows, columns_of, left, planned
from echelon.data.prepare.splits import Mixing
from echelon.data.prepare.step import mask
from echelon.data.shards.schema import Schema, check_names

if TYPE_CHECKING:
    from echelon.data.prepare.work import Work

PLACE = "\x00place"
STAGE = "scatter"


def encode_block(work: Work, number: int) -> Any:
    """Encode it, write it by shards, and say what it has for whom."""
    rows = left(work, len(work.segments), number)
    compared = len(rows.outs)
    plan = unpack(work.desk.path("plan", number, "plan").read_bytes())
    kept, columns = _encoded(work, rows, plan)
    bad = next(quarantine.first(rows.outs[compared:]), "")
    desk = work.desk
    desk.put(desk.path(STAGE, number, "jsonl"), quarantine.text_of(rows.outs))
    pairs = [formed(name, *pair) for name, pair in columns.items()]
    fields = tuple(field for field, _ in pairs)
    check_names(fields)
    values = [column for _, column in pairs]
    entries = _entries(plan, kept, work.mixing)
    pieces = _scattered(desk, number, fields, values, entries) if fields else []
    return {
        "file": rows.file,
        "schema": [field.to_json() for field in fields],
        "pieces": pieces,
        "out": quarantine.counted(rows.outs),
        "bad": bad,
    }


def _encoded(
    work: Work, rows: Rows, plan: Learnt
) -> tuple[NDArray[np.int64], dict[str, tuple[Values, Any]]]:
    """Which rows are left, and the columns of them that are written, with Arrow's metadata."""
    kept: NDArray[np.int64] = np.arange(rows.batch.num_rows)
    wanted = work.outline.wanted
    columns: Columns = columns_of(rows.batch, wanted) | planned(plan, wanted)
    kept, columns = _without(rows, kept, columns, _gaps(work.recipe.keep, columns), "keep")
    for at, feature in enumerate(work.features):
        if not len(kept):
            break
        known = work.learnt_of("feature", at)
        gone = sorted(feature.refused(columns, known).items())
        kept, columns = _without(rows, kept, columns, gone, f"features.{at} {feature.kind}")
        columns = {**columns, **feature.encode(columns, known)}
    if not len(kept):
        return kept, {}
    written = {name: (columns[name], None) for name in work.outline.written}
    for name in work.recipe.keep:
        written[name] = (columns[name], rows.batch.schema.field(name).metadata)
    if "weight" in plan:
        written[WEIGHT] = (plan["weight"][kept], None)
    return kept, written


def _without(
    rows: Rows,
    kept: NDArray[np.int64],
    columns: Columns,
    gone: list[tuple[int, str]],
    step: str,
) -> tuple[NDArray[np.int64], Columns]:
    """Rows that are left are numbered anew; the quarantine names them as they were."""
    if not gone:
        return kept, columns
    told = [(int(kept[row]), reason) for row, reason in gone]
    rows.outs += quarantine.told(rows.place, rows.batch, told, step)
    left_over = np.delete(np.arange(len(kept)), [row for row, _ in gone])
    return kept[left_over], take_all(columns, left_over)


def _gaps(keep: tuple[str, ...], columns: Columns) -> list[tuple[int, str]]:
    """Rows without a value in a column that is kept: null or NaN, alone or in a list."""
    found: dict[int, str] = {}
    for name in keep:
        column: Any = columns[name]
        for row in np.flatnonzero(mask(pc.is_null(column, nan_is_null=True))).tolist():
            found.setdefault(row, f"column {name!r} has no value")
        for row in _with_gaps_within(column):
            found.setdefault(row, f"column {name!r} has a list in which a value is missing")
    return sorted(found.items())


def _with_gaps_within(column: Any) -> list[int]:
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return []
    there = np.flatnonzero(mask(column.is_valid()))
    column = column.drop_null()
    gaps = pc.is_null(column.flatten(), nan_is_null=True)
    rows = pc.list_parent_indices(column).filter(gaps).unique()
    return [int(row) for row in there[rows.to_numpy()]]


def _entries(plan: Learnt, kept: NDArray[np.int64], mixing: Mixing) -> tuple[NDArray[Any], ...]:
    """Row (of those kept), split, shard and place of everything that is written."""
    now = np.full(len(plan["split"]), -1, np.int64)
    now[kept] = np.arange(len(kept))
    source = plan["row"].astype(np.int64) if "row" in plan else np.arange(len(plan["split"]))
    row, split = now[source], plan["split"][source]
    there = np.flatnonzero(row >= 0)
    split, shard = split[there], plan["shard"][there]
    return row[there], split, shard, mixing.places(split, shard, plan["place"][there])


def _by_place(split: NDArray[Any], shard: NDArray[Any], place: NDArray[Any]) -> NDArray[np.int64]:
    """The order by split, shard and place; no two are the same. Sorting one word takes a third of
    the time of sorting three."""
    places = int(place.max(initial=0)) + 1
    shards = int(shard.max(initial=0)) + 1
    word = (split.astype(np.int64) * shards + shard) * places + place
    return np.argsort(word)


def _scattered(
    desk: Desk,
    number: int,
    fields: Schema,
    values: list[Values],
    entries: tuple[NDArray[Any], ...],
) -> list[tuple[int, int, int]]:
    """Write one batch per shard; (split, shard, rows) of each."""
    order = _by_place(*entries[1:])
    row, split, shard, place = (column[order] for column in entries)
    taken = [take(column, row) for column in values]
    edges = np.flatnonzero((np.diff(split) != 0) | (np.diff(shard) != 0)) + 1
    bounds = [0, *edges.tolist(), len(row)] if len(row) else []
    schema = pa.schema([*(pa.field(f.name, f.arrow_type()) for f in fields), (PLACE, pa.int64())])
    path = desk.path(STAGE, number, "arrow")
    aside = Desk.aside(path)
    pieces = []
    with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as stream:
        for start, stop in pairwise(bounds):
            arrays = [
                arrow(field, part(column, start, stop))
                for field, column in zip(fields, taken, strict=True)
            ]
            arrays.append(pa.array(place[start:stop]))
            stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            pieces.append((int(split[start]), int(shard[start]), stop - start))
    aside.replace(path)
    return pieces
