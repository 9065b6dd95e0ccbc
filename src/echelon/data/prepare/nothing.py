"""What to say when no record is left: what became of them, and of the first by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.parse import parse
from echelon.data.prepare.quarantine import added
from echelon.data.prepare.scatter import STAGE as SCATTER

if TYPE_CHECKING:
    from echelon.data.prepare.work import Work


def nothing_left(what: str, work: Work) -> DataError:
    """Nothing is left for `what`: with how many records each step took out, and the first."""
    counts = _counts(work)
    told = f"no records are left {what}"
    if counts:
        steps = ", ".join(f"{step} {count:,}" for step, count in counts.items())
        told += f": {sum(counts.values()):,} were taken out ({steps})"
        told += "".join(f"; the first: {out}" for out in islice(_outs(work), 1))
    return DataError(told)


def nothing_read(seen: Sequence[Block]) -> DataError:
    """No block says what columns there are: with the first record that cannot be read."""
    whole = [block for block in seen if block.fault is None]
    told = next(filter(None, map(_unreadable, whole)), None)
    told = told or next((f"{b.file}: {b.fault}" for b in seen if b.fault), "the inputs are empty")
    return DataError(f"there is nothing to prepare: {told}")


def _unreadable(block: Block) -> str | None:
    names = block.source.options.columns or block.names or ()
    bad = parse(block, pa.schema([(name, pa.large_utf8()) for name in names])).bad
    count = sum(one.records for one in bad)
    return f"none of the first {count:,} records can be read; the first: {bad[0]}" if bad else None


def _stages(work: Work) -> list[str]:
    return [*(segment.stage for segment in work.segments), SCATTER]


def _counts(work: Work) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in _stages(work):
        for facts in work.desk.recall(stage) or ():
            added(found, facts["out"])
    return {step: count for step, count in found.items() if count}


def _outs(work: Work) -> Iterator[str]:
    """The first of each step of each block, in the order that the quarantine would have."""
    for number in range(len(work.desk.recall(work.segments[0].stage) or ())):
        for stage in _stages(work):
            path = work.desk.path(stage, number, "jsonl")
            if path.exists():
                yield from _first(path)


def _first(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for line in islice(file, 1):
            out = json.loads(line)
            yield f"{out['file']}:{out['line']}: {out['reason']}"
