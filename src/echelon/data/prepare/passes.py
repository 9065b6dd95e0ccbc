"""The work on one block in each pass before encoding: parse, clean, and let features learn.

    clean_block   parse the block (first segment) or load what the previous segment left; run the
                  segment's steps; write records, quarantine, and the numbers that the parent merges
    look_clean    let a cleaning step observe the records once more
    look_block    let features observe the train records

Encoding and writing shards are in write.py. `Work` is what every pass needs: the recipe, the work
folder, and what steps and features have learnt so far. Between passes a block's records lie in
`clean-N/NUMBER.arrow`, which the next pass maps into memory; the files beside it are

    .jsonl  quarantined records     .look  what the step after the segment observed
    .noted  flagged records         .hash  what it compares records by
                                    .keys  class, group, time and length (last segment)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.files import replacing, write_atomic
from echelon.data.formats import parse
from echelon.data.formats.records import Block, Input, Source
from echelon.data.prepare import outline, workdir
from echelon.data.prepare.deal import Mixing
from echelon.data.prepare.outline import Outline, Segment, comparing, segments
from echelon.data.prepare.ranking import TRAIN
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.steps import RECORD, SPLIT, Columns, rows, take_all
from echelon.data.prepare.workdir import Desk, Learnt, Out, pack, unpack

SCHEMA = "schema.arrow"
LEARNT_FROM = (None, "train")
"""Cleaning steps learn from inputs of these splits: train, or not split yet."""


class Work:
    """The context of every task: the recipe, the work folder, and what was learnt so far.

    Each process builds its own from the engine's `setting`.
    """

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.recipe = Recipe.model_validate(setting["recipe"])
        self.desk = Desk(Path(setting["desk"]))
        self.steps = self.recipe.steps()
        self.features = self.recipe.made()
        self.segments = segments(self.steps)
        self._learnt: dict[str, Learnt] = {}

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that are read. The engine stores them before the first task."""
        return pa.ipc.read_schema(pa.py_buffer((self.desk.root / SCHEMA).read_bytes()))

    @cached_property
    def outline(self) -> Outline:
        return Outline(self.recipe, self.schema, self.steps, self.features)

    @cached_property
    def mixing(self) -> Mixing:
        """The order of records within shards. Requires the plan."""
        plan = self.desk.recall("plan")
        assert plan is not None, "planned before"
        return Mixing(plan["written"], plan["shards"], self.recipe.seed)

    def learnt_of(self, what: str, at: int) -> Learnt:
        """Return what step or feature `at` has learnt so far; `what` is "clean" or "feature".

        Loaded files are cached by pass, so a task sees what the last completed pass has learnt.
        """
        name = f"{what}-{at}"
        passed = self.desk.recall(f"learnt/{name}")
        if passed is None:
            return {}
        key = f"{name}/{passed}"
        if key not in self._learnt:
            self._learnt[key] = workdir.load(self.desk.root / "learnt" / key.replace("/", "-"))
        return self._learnt[key]

    def visible(self, block: Columns, targets: set[int]) -> dict[int, Columns]:
        """Return, for each target feature, the columns it sees: raw ones and those made before it.

        Encodes the features that the targets depend on, and leaves out rows that these refuse.
        """
        needed = self.outline.ancestors(targets)
        columns = dict(block)
        found: dict[int, Columns] = {}
        for at, feature in enumerate(self.features):
            if at in targets:
                found[at] = dict(columns)
            if at in needed:
                known = self.learnt_of("feature", at)
                gone = feature.refused(columns, known)
                if gone:
                    columns = take_all(columns, stays(columns, gone))
                columns |= feature.encode(columns, known)
        return found


def one_thread() -> None:
    """Make Arrow use the calling thread alone, and the system's allocator.

    Arrow's own allocators return memory to the kernel that the next block needs again.
    """
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    pa.set_memory_pool(pa.system_memory_pool())


# The passes, each over one block


def clean_block(
    work: Work, segment: Segment, number: int, block: Block | None, split: str | None
) -> Any:
    """Run the steps of a segment on a block.

    `block` is given for the first segment, which parses it; a later one loads what the segment
    before it left. Return the block's counts.
    """
    desk = work.desk
    read, bad = 0, ""
    if block is not None:
        parsed = parse(block, work.schema)
        step = workdir.READ if block.fault is None else workdir.FILE
        outs = [
            Out(bad.file, bad.line, bad.reason, workdir.cut(bad.text), step, bad.records)
            for bad in parsed.bad
        ]
        members = [name for name, _ in block.members]
        rows = Rows(block.file, parsed.batch, parsed.lines, members, block.record, outs)
        read = parsed.batch.num_rows + sum(bad.records for bad in parsed.bad)
        bad = workdir.first(outs)
    else:
        rows = left(work, segment.number, number)
    for at in range(segment.start, segment.stop):
        _step(work, at, rows)
    if segment.last:
        rows.drop(outline.without_key(rows.batch, outline.required(work.recipe)), "split")
    _partials(work, segment, number, rows.batch, split)
    size = rows.batch.nbytes
    if segment.last:
        rows.batch = _dictionary_encoded(rows.batch, work.outline.categories)
    save(desk.path(segment.stage, number, "arrow"), rows)
    write_atomic(desk.path(segment.stage, number, "jsonl"), workdir.text_of(rows.outs))
    write_atomic(desk.path(segment.stage, number, "noted"), workdir.text_of(rows.noted))
    return {
        "file": rows.file,
        "read": read,
        "rows": rows.batch.num_rows,
        "bytes": size,
        "out": workdir.counted(rows.outs),
        "noted": workdir.counted(rows.noted),
        "counts": rows.counts,
        "bad": bad,
        "fault": block.fault if block is not None else None,
        "split": split,
    }


def _step(work: Work, at: int, rows: Rows) -> None:
    """Run a cleaning step on a block; record what it dropped, flagged and counted."""
    step = work.steps[at]
    name = f"clean.{at} {step.kind}"
    done = step.clean(rows.batch, work.learnt_of("clean", at))
    rows.noted += workdir.told(rows.place, rows.batch, done.noted, name)
    rows.become(done.block, done.dropped, name)
    workdir.added(rows.counts, {f"{name}: {what}": n for what, n in done.counts.items() if n})


def _partials(
    work: Work, segment: Segment, number: int, batch: pa.RecordBatch, split: str | None
) -> None:
    """Write what the parent merges over all blocks at the end of the segment."""
    desk = work.desk
    if segment.looks is not None and split in LEARNT_FROM:
        found = work.steps[segment.looks].look(0, batch, {})
        write_atomic(desk.path(segment.stage, number, "look"), pack(found))
    if segment.compares is not None:
        found = comparing(work.steps[segment.compares]).hashes(batch)
        write_atomic(desk.path(segment.stage, number, "hash"), pack(found))
    if segment.last:
        by = work.recipe.split.by if work.recipe.split is not None else None
        found = outline.keys(batch, work.outline.keys, by, work.outline.texts)
        write_atomic(desk.path(segment.stage, number, "keys"), pack(found))


def _dictionary_encoded(batch: pa.RecordBatch, categories: set[str]) -> pa.RecordBatch:
    """Dictionary-encode the text columns that serve as categories, once for all later passes."""
    columns = [
        column.dictionary_encode() if name in categories else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def look_clean(work: Work, segment: Segment, number: int, at: int) -> Any:
    """Run a further look of a cleaning step over the records that the segment left."""
    assert segment.looks is not None
    rows = loaded(work.desk, segment.stage, number)
    learnt = work.learnt_of("clean", segment.looks)
    found = work.steps[segment.looks].look(at, rows.batch, learnt)
    write_atomic(work.desk.path(f"{segment.stage}-look-{at}", number, "look"), pack(found))
    return {}


def look_block(work: Work, stage: str, number: int, active: list[tuple[int, int]]) -> Any:
    """Run looks of several features, pairs (feature, look), over the train records of a block."""
    visible = work.visible(train_rows(work, number), {at for at, _ in active})
    for at, passed in active:
        learnt = work.learnt_of("feature", at) if passed else {}
        found = work.features[at].look(passed, visible[at], learnt)
        write_atomic(work.desk.path(stage, number, f"look-{at}"), pack(found))
    return {}


def train_rows(work: Work, number: int) -> Columns:
    """Return the columns that features read, for the train records of a block."""
    rows = left(work, work.segments[-1].number + 1, number)
    plan = unpack(work.desk.path("plan", number, "plan").read_bytes())
    block = columns_of(rows.batch, work.outline.wanted) | planned(plan, work.outline.wanted)
    return take_all(block, np.flatnonzero(plan["split"] == TRAIN))


def left(work: Work, segment: int, number: int) -> Rows:
    """Return the records that a segment begins with: what the one before left, less duplicates.

    The segment after the last one stands for planning and encoding.
    """
    before = work.segments[segment - 1]
    rows = loaded(work.desk, before.stage, number)
    if before.compares is not None:
        gone = work.desk.result(f"{before.stage}-drop", number) or []
        step = f"clean.{before.compares} {work.steps[before.compares].kind}"
        rows.drop([(row, reason) for row, reason in gone], step)
    return rows


def columns_of(batch: pa.RecordBatch, wanted: set[str] | None = None) -> dict[str, Any]:
    """Return the columns of a batch by name, all or those wanted."""
    names = [name for name in batch.schema.names if wanted is None or name in wanted]
    return {name: batch.column(name) for name in names}


def planned(plan: Learnt, wanted: set[str]) -> dict[str, Any]:
    """Return split and number of each row of a block, for features that read these columns."""
    split = plan["split"]
    found = {SPLIT: split, RECORD: plan["first"] + np.arange(len(split))}
    return {name: values for name, values in found.items() if name in wanted}


def stays(columns: Columns, gone: Mapping[int, str]) -> Any:
    """Return the indices of the rows that are not in `gone`."""
    left = np.ones(rows(next(iter(columns.values()))), np.bool_)
    left[list(gone)] = False
    return np.flatnonzero(left)


# A block's records between two passes


@dataclass(slots=True)
class Rows:
    """The records of a block with their lines in the input, and what was taken out or flagged."""

    file: str
    batch: pa.RecordBatch
    lines: NDArray[np.int64]
    members: list[str] = field(default_factory=list)
    """For inputs with one record per file: the files of lines `first`, `first` + 1, …"""
    first: int = 0
    outs: list[Out] = field(default_factory=list)
    noted: list[Out] = field(default_factory=list)
    """Flagged records: they stay, and are listed in noted.jsonl."""
    counts: dict[str, int] = field(default_factory=dict)

    def place(self, row: int) -> tuple[str, int]:
        """Return file and line of a record."""
        line = int(self.lines[row])
        return (self.members[line - self.first], 1) if self.members else (self.file, line)

    def drop(self, rows: list[tuple[int, str]], step: str) -> None:
        """Take out rows, each with the reason why `step` does."""
        if rows:
            stays = self._note(rows, step)
            self.batch = self.batch.filter(pa.array(stays))

    def become(self, batch: pa.RecordBatch, rows: list[tuple[int, str]], step: str) -> None:
        """Replace the records by what a step made of them, which lacks `rows` of the old ones."""
        if rows:
            self._note(rows, step)
        self.batch = batch

    def _note(self, rows: list[tuple[int, str]], step: str) -> NDArray[np.bool_]:
        self.outs += workdir.told(self.place, self.batch, rows, step)
        stays = np.ones(len(self.lines), np.bool_)
        stays[[row for row, _ in rows]] = False
        self.lines = self.lines[stays]
        return stays


def save(path: Path, rows: Rows) -> None:
    """Write the records as an Arrow file that `loaded` can map into memory."""
    batch = rows.batch.append_column(LINES, pa.array(rows.lines))
    origin = json.dumps([rows.file, rows.members, rows.first])
    named = batch.replace_schema_metadata({ORIGIN: origin})
    with (
        replacing(path) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, named.schema) as stream,
    ):
        stream.write_batch(named)


def loaded(desk: Desk, stage: str, number: int) -> Rows:
    """Return the records that `save` wrote, mapped into memory."""
    with pa.memory_map(str(desk.path(stage, number, "arrow"))) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    file, members, first = json.loads(batch.schema.metadata[ORIGIN])
    lines = batch.column(LINES).to_numpy()
    plain = batch.drop_columns([LINES]).replace_schema_metadata(None)
    return Rows(file, plain, lines, members, first)


LINES = "\x00line"
"""The column of such a file that holds each record's line."""
ORIGIN = b"origin"
"""The key of its metadata that holds `Rows.file`, `members` and `first`."""


# A block on its way to a worker


def block_to(block: Block) -> dict[str, Any]:
    """Return a block as plain values, without its bytes, which travel beside the message."""
    source = block.source
    plain = {
        field.name: getattr(block, field.name)
        for field in dataclasses.fields(Block)
        if field.name not in ("source", "data")
    }
    origin = {
        field.name: getattr(source, field.name)
        for field in dataclasses.fields(Source)
        if field.name != "options"
    }
    options = source.options.model_dump(mode="json", exclude_unset=True)
    return plain | {"source": origin, "options": options, "bytes": block.data is not None}


def block_from(plain: Mapping[str, Any], data: memoryview) -> Block:
    """Return the block that `block_to` was given."""
    values = dict(plain)
    options = Input.model_validate(values.pop("options"))
    source = Source(**values.pop("source"), options=options)
    names, members = values.pop("names"), values.pop("members")
    has_bytes = values.pop("bytes")
    return Block(
        **values,
        source=source,
        names=None if names is None else tuple(names),
        members=tuple((name, label) for name, label in members),
        data=bytes(data) if has_bytes else None,
    )
