"""What a worker does with a block of records: clean it, look at it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare import keys, quarantine
from echelon.data.prepare.columns import RECORD, SPLIT, Columns, take_all
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.learnt import Learnt, pack, unpack
from echelon.data.prepare.parse import parse
from echelon.data.prepare.quarantine import Out
from echelon.data.prepare.segments import Segment, comparing

if TYPE_CHECKING:
    from echelon.data.prepare.blocks import Block
    from echelon.data.prepare.work import Work

LINES = "\x00line"
"""The column of a kept block that says where its records come from."""
ORIGIN = b"origin"
LEARNT_FROM = (None, "train")
"""Inputs of other splits are not looked at for cleaning."""


@dataclass(slots=True)
class Rows:
    """A block on its way: its records, where they come from, and which are out."""

    file: str
    batch: pa.RecordBatch
    lines: NDArray[np.int64]
    members: list[str] = field(default_factory=list)
    """Files that are records of their own: those of lines `first`, `first` + 1, …"""
    first: int = 0
    outs: list[Out] = field(default_factory=list)
    noted: list[Out] = field(default_factory=list)
    """Records that stay, and are worth a look."""
    counts: dict[str, int] = field(default_factory=dict)

    def place(self, row: int) -> tuple[str, int]:
        """File and line of a record."""
        line = int(self.lines[row])
        return (self.members[line - self.first], 1) if self.members else (self.file, line)

    def drop(self, rows: list[tuple[int, str]], step: str) -> None:
        if rows:
            stays = self._note(rows, step)
            self.batch = self.batch.filter(pa.array(stays))

    def become(self, batch: pa.RecordBatch, rows: list[tuple[int, str]], step: str) -> None:
        """What a step has made of the records; `rows` of those before are not in it."""
        if rows:
            self._note(rows, step)
        self.batch = batch

    def _note(self, rows: list[tuple[int, str]], step: str) -> NDArray[np.bool_]:
        self.outs += quarantine.told(self.place, self.batch, rows, step)
        stays = np.ones(len(self.lines), np.bool_)
        stays[[row for row, _ in rows]] = False
        self.lines = self.lines[stays]
        return stays


def clean_block(
    work: Work, segment: Segment, number: int, block: Block | None, split: str | None
) -> Any:
    """The first stretch of steps on a block of a file, a later one on what the one before left."""
    desk = work.desk
    read, bad = 0, ""
    if block is not None:
        parsed = parse(block, work.schema)
        step = quarantine.READ if block.fault is None else quarantine.FILE
        outs = [
            Out(bad.file, bad.line, bad.reason, quarantine.cut(bad.text), step, bad.records)
            for bad in parsed.bad
        ]
        members = [name for name, _ in block.members]
        rows = Rows(block.file, parsed.batch, parsed.lines, members, block.record, outs)
        read = parsed.batch.num_rows + sum(bad.records for bad in parsed.bad)
        bad = next(quarantine.first(outs), "")
    else:
        rows = left(work, segment.number, number)
    for at in range(segment.start, segment.stop):
        _step(work, at, rows)
    if segment.last:
        rows.drop(keys.without_key(rows.batch, keys.required(work.recipe)), "split")
    _partials(work, segment, number, rows.batch, split)
    size = rows.batch.nbytes
    if segment.last:
        rows.batch = _numbered(rows.batch, work.outline.categories)
    save(desk.path(segment.stage, number, "arrow"), rows)
    desk.put(desk.path(segment.stage, number, "jsonl"), quarantine.text_of(rows.outs))
    desk.put(desk.path(segment.stage, number, "noted"), quarantine.text_of(rows.noted))
    return {
        "file": rows.file,
        "read": read,
        "rows": rows.batch.num_rows,
        "bytes": size,
        "out": quarantine.counted(rows.outs),
        "noted": quarantine.counted(rows.noted),
        "counts": rows.counts,
        "bad": bad,
        "fault": block.fault if block is not None else None,
        "split": split,
    }


def _numbered(batch: pa.RecordBatch, categories: set[str]) -> pa.RecordBatch:
    """Texts as numbers into a list of the different ones: found once, not in every pass."""
    columns = [
        column.dictionary_encode() if name in categories else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _step(work: Work, at: int, rows: Rows) -> None:
    step = work.steps[at]
    name = f"clean.{at} {step.kind}"
    done = step.clean(rows.batch, work.learnt_of("clean", at))
    rows.noted += quarantine.told(rows.place, rows.batch, done.noted, name)
    rows.become(done.block, done.dropped, name)
    quarantine.added(rows.counts, {f"{name}: {what}": n for what, n in done.counts.items() if n})


def _partials(
    work: Work, segment: Segment, number: int, batch: pa.RecordBatch, split: str | None
) -> None:
    """What is known of all records at the end of a stretch."""
    desk = work.desk
    if segment.looks is not None and split in LEARNT_FROM:
        found = work.steps[segment.looks].look(0, batch, {})
        desk.put(desk.path(segment.stage, number, "look"), pack(found))
    if segment.compares is not None:
        found = comparing(work.steps[segment.compares]).hashes(batch)
        desk.put(desk.path(segment.stage, number, "hash"), pack(found))
    if segment.last:
        by = work.recipe.split.by if work.recipe.split is not None else None
        found = keys.keys(batch, work.outline.keys, by, work.outline.texts)
        desk.put(desk.path(segment.stage, number, "keys"), pack(found))


def look_clean(work: Work, segment: Segment, number: int, at: int) -> Any:
    """A further pass of a cleaning step over the records before it."""
    assert segment.looks is not None
    rows = loaded(work.desk, segment.stage, number)
    learnt = work.learnt_of("clean", segment.looks)
    found = work.steps[segment.looks].look(at, rows.batch, learnt)
    work.desk.put(work.desk.path(f"{segment.stage}-look-{at}", number, "look"), pack(found))
    return {}


def look_block(work: Work, stage: str, number: int, active: list[tuple[int, int]]) -> Any:
    """Passes of several features over the train records of a block."""
    visible = work.visible(train_rows(work, number), {at for at, _ in active})
    for at, passed in active:
        learnt = work.learnt_of("feature", at) if passed else {}
        found = work.features[at].look(passed, visible[at], learnt)
        work.desk.put(work.desk.path(stage, number, f"look-{at}"), pack(found))
    return {}


def train_rows(work: Work, number: int) -> Columns:
    rows = left(work, work.segments[-1].number + 1, number)
    plan = unpack(work.desk.path("plan", number, "plan").read_bytes())
    block = columns_of(rows.batch, work.outline.wanted) | planned(plan, work.outline.wanted)
    return take_all(block, np.flatnonzero(plan["split"] == 0))


def columns_of(batch: pa.RecordBatch, wanted: set[str] | None = None) -> dict[str, Any]:
    names = [name for name in batch.schema.names if wanted is None or name in wanted]
    return {name: batch.column(name) for name in names}


def planned(plan: Learnt, wanted: set[str]) -> dict[str, Any]:
    """What the plan says of the rows of a block, where a feature wants to know."""
    split = plan["split"]
    found = {SPLIT: split, RECORD: plan["first"] + np.arange(len(split))}
    return {name: values for name, values in found.items() if name in wanted}


def left(work: Work, segment: int, number: int) -> Rows:
    """What stretch `segment` begins with: the records before it, less those that were compared
    and found to be too many."""
    before = work.segments[segment - 1]
    rows = loaded(work.desk, before.stage, number)
    if before.compares is not None:
        gone = work.desk.result(f"{before.stage}-drop", number) or []
        step = f"clean.{before.compares} {work.steps[before.compares].kind}"
        rows.drop([(row, reason) for row, reason in gone], step)
    return rows


def save(path: Path, rows: Rows) -> None:
    """As a file that can be mapped."""
    batch = rows.batch.append_column(LINES, pa.array(rows.lines))
    origin = json.dumps([rows.file, rows.members, rows.first])
    named = batch.replace_schema_metadata({ORIGIN: origin})
    aside = Desk.aside(path)
    with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, named.schema) as stream:
        stream.write_batch(named)
    aside.replace(path)


def loaded(desk: Desk, stage: str, number: int) -> Rows:
    with pa.memory_map(str(desk.path(stage, number, "arrow"))) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    file, members, first = json.loads(batch.schema.metadata[ORIGIN])
    lines = batch.column(LINES).to_numpy()
    plain = batch.drop_columns([LINES]).replace_schema_metadata(None)
    return Rows(file, plain, lines, members, first)
