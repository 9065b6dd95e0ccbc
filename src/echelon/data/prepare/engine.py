"""The engine: all passes of a recipe in order, resumable after a crash.

    pass            one task per     a worker runs          then the parent
    ─────────────────────────────────────────────────────────────────────────────────────────────
    clean-0         block read       passes.clean_block     a step that must see all records ends
      │                                                     the segment: the parent merges what the
      │                                                     blocks observed (Step.learn) …
    clean-0-look-1  block            passes.look_clean      … after further looks, if it needs any;
      │                                                     or it lists duplicates in clean-0-drop
    clean-1 …       block            passes.clean_block     likewise, up to the last segment
      │
    plan            (parent only)                           splits.make_plan: split, shard and
      │                                                     position of every record
    look-0.0-2.0 …  block with       passes.look_block      merges what the blocks observed
      │             train records                           (Feature.learn); independent features
      │                                                     share a pass
    scatter         block            write.encode_block     checks that all blocks agree on a schema
      │
    shards-train …  shard            write.write_shard
      │
    finish          (parent only)                           finish.finish: manifests, quarantine,
                                                            prepared.json; then a rename

A pass over blocks is an ordered map (workers.py): any number of processes run its tasks, the
parent takes their results in block order. So the output depends on recipe, inputs and seed alone.

Each pass has a folder of its name in the work folder (workdir.py). A task writes its files there
and its small result, `NUMBER.json`, last; a complete pass is noted in `PASS.json`, what was learnt
in `learnt/`. A preparation that was interrupted at any point skips what is complete when it is
started again.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.files import write_atomic
from echelon.core.process import give_back_freed_memory
from echelon.data.formats import blocks, infer, parse, refuse_others
from echelon.data.formats.records import SIZE, Block
from echelon.data.prepare import workdir
from echelon.data.prepare.outline import Segment, comparing
from echelon.data.prepare.passes import LEARNT_FROM, SCHEMA, Work, block_to, loaded
from echelon.data.prepare.ranking import SPLITS
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.splits import Cleaned, make_plan
from echelon.data.prepare.workdir import Desk, Learnt, added, unpack
from echelon.data.prepare.workers import Pool, Task, Watch
from echelon.data.prepare.write import STAGE as SCATTER
from echelon.data.shards.layout import Field, Schema, same_schema

Facts = dict[str, Any]


class Engine:
    """Runs the passes of one recipe in one work folder.

    `setting` is what every worker receives: plain values from which it builds its own `Work`.
    """

    def __init__(self, recipe: Recipe, desk: Desk, watch: Watch) -> None:
        self.recipe = recipe
        self.desk = desk
        self._watch = watch
        self.setting = {"recipe": recipe.values(), "desk": str(desk.root)}
        self.work = Work(self.setting)

    def blocks(self) -> Generator[Block, None, None]:
        """Yield the blocks of all inputs, cut while they are consumed."""
        yield from blocks(self.recipe.read, SIZE)

    def fit(self, coming: Iterator[Block]) -> Iterator[Block]:
        """Infer the columns from the first blocks and check the recipe against them.

        Return all blocks, those that were inspected first. Raise DataError if no block has a
        readable record.
        """
        if (self.desk.root / SCHEMA).exists():
            _ = self.work.outline  # building the outline checks the recipe
            return coming
        seen: list[Block] = []
        for block in coming:
            seen.append(block)
            schema = infer(block, self.recipe.columns)
            if schema is not None:
                refuse_others(block, self.recipe.columns)
                write_atomic(self.desk.root / SCHEMA, schema.serialize().to_pybytes())
                _ = self.work.outline
                return chain(seen, coming)
        raise nothing_read(seen)

    def run(self, pool: Pool, coming: Iterator[Block]) -> None:
        """Run all passes up to the shards; their results are in the work folder."""
        self._pool = pool
        for segment in self.work.segments:
            self._clean(segment, coming)
        if self.desk.recall("plan") is None:
            self._watch.began("plan", None)
            self.desk.remember("plan", self._plan())
        self._learn()
        self._encode()
        self._shards()

    # ── cleaning ──────────────────────────────────────────────────────────────────────────────

    def _clean(self, segment: Segment, coming: Iterator[Block]) -> None:
        """Run one segment over all blocks, then what the step at its end needs of all records."""
        first = segment.number == 0
        tasks = self._reading(coming) if first else self._cleaning(segment)
        results = self._stage(segment.stage, "read" if first else "clean", tasks)
        if not any(facts["rows"] for facts in results):
            raise nothing_left("to prepare", self.work)
        if segment.looks is not None:
            self._learn_step(segment, results)
        if segment.compares is not None:
            self._compare(segment, results)
        if not first:
            self.desk.remove(self.work.segments[segment.number - 1].stage, "arrow")

    def _reading(self, coming: Iterator[Block]) -> Iterator[Task]:
        """Yield the tasks of the first segment, which parses the blocks that it is given."""
        for block in coming:
            message = {"do": "clean", "segment": 0, "number": block.number, "split": block.split}
            told = f"{block.file}, from record {block.record}"
            yield Task(told, message | {"block": block_to(block)}, block.data or b"")

    def _cleaning(self, segment: Segment) -> Iterator[Task]:
        """Yield the tasks of a later segment, which loads what the one before left."""
        for number, facts in enumerate(self._cleaned(0)):
            message = {"do": "clean", "segment": segment.number, "number": number, "block": None}
            yield Task(f"cleaning {facts['file']}", message | {"split": facts["split"]})

    def _learn_step(self, segment: Segment, results: list[Facts]) -> None:
        """Let the step after the segment learn. Its first look was part of the segment's pass."""
        at = segment.looks
        assert at is not None
        step = self.work.steps[at]
        numbers = [n for n, facts in enumerate(results) if facts["split"] in LEARNT_FROM]
        for passed in range(self._passed("clean", at), step.looks):
            stage = segment.stage
            run: Iterator[Facts] = iter(())
            if passed:
                stage = f"{segment.stage}-look-{passed}"
                message = {"do": "look-clean", "segment": segment.number, "at": passed}
                tasks = (Task(f"{step.kind}", message | {"number": n}) for n in numbers)
                run = self._run(stage, tasks, f"look for {step.kind}", len(numbers))
            partials = self._partials(stage, "look", numbers, run)
            known = self.work.learnt_of("clean", at)
            found = step.learn(passed, partials, known, self.desk.stage("scratch"))
            self._keep("clean", at, passed + 1, found, partials)

    def _compare(self, segment: Segment, results: list[Facts]) -> None:
        stage = f"{segment.stage}-drop"
        if self.desk.recall(stage) is None:
            self._watch.began("compare", None)
            drop_repeated(self.work, segment, stage, [facts["rows"] for facts in results])
            self.desk.remember(stage, True)

    def _cleaned(self, segment: int) -> list[Facts]:
        """Return the results of a segment that is complete, one per block."""
        found: list[Facts] | None = self.desk.recall(self.work.segments[segment].stage)
        assert found is not None, "cleaned before"
        return found

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def _plan(self) -> Any:
        last = self.work.segments[-1]
        known = []
        for number, facts in enumerate(self._cleaned(last.number)):
            gone: list[tuple[int, str]] = []
            if last.compares is not None:
                gone = self.desk.result(f"{last.stage}-drop", number) or []
            rows = np.array([row for row, _ in gone], np.int64)
            known.append(Cleaned(facts["rows"], facts["bytes"], facts["split"], rows))
        plan = make_plan(self.recipe, self.desk, last.stage, known)
        if plan is None:
            raise nothing_left("for training", self.work)
        return plan

    # ── features ──────────────────────────────────────────────────────────────────────────────

    def _learn(self) -> None:
        """Let the features learn from train; those that do not depend on one another share a pass.

        A feature waits for its ancestors, because it observes the columns that they encode.
        """
        features, outline = self.work.features, self.work.outline
        while True:
            passed = [self._passed("feature", at) for at in range(len(features))]
            ready = {at for at, feature in enumerate(features) if passed[at] >= feature.looks}
            active = [
                (at, passed[at])
                for at in range(len(features))
                if at not in ready and outline.ancestors({at}) <= ready
            ]
            if not active:
                return
            self._look(active)

    def _look(self, active: list[tuple[int, int]]) -> None:
        """Run one pass for these features, pairs (feature, look), and merge what it found.

        The first feature merges while the pass runs; the next ones read the files of that pass.
        """
        stage = "look-" + "-".join(f"{at}.{passed}" for at, passed in active)
        plan = self.desk.recall("plan")
        assert plan is not None, "planned before"
        numbers = [number for number, rows in enumerate(plan["train"]) if rows]
        kinds = ", ".join(dict.fromkeys(self.work.features[at].kind for at, _ in active))
        message = {"do": "look", "active": active}
        tasks = (Task(f"learning {kinds}", message | {"number": n}) for n in numbers)
        run = self._run(stage, tasks, f"learn {kinds}", len(numbers))
        for at, passed in active:
            partials = self._partials(stage, f"look-{at}", numbers, run)
            known = self.work.learnt_of("feature", at) if passed else {}
            scratch = self.desk.stage(f"scratch-{at}")
            found = self.work.features[at].learn(passed, partials, known, scratch)
            self._keep("feature", at, passed + 1, found, partials)
            self.desk.clear(scratch.name)
        self.desk.clear(stage)

    def _encode(self) -> None:
        count = len(self._cleaned(-1))
        tasks = (Task("encoding", {"do": "encode", "number": number}) for number in range(count))
        self._stage(SCATTER, "encode", tasks, count)
        if self.desk.recall("fields") is None:
            self.desk.remember("fields", [f.to_json() for f in self._one_schema()])
        self.desk.remove(self.work.segments[-1].stage, "arrow")

    def _one_schema(self) -> Schema:
        """Return the schema of the shards; raise DataError if blocks disagree on it."""
        found: Schema | None = None
        for facts in self.desk.recall(SCATTER) or ():
            here = tuple(Field.from_json(plain) for plain in facts["schema"])
            if here and found is None:
                found = here
            elif here and found is not None:
                same_schema(found, here, facts["file"])
        if found is None:
            raise nothing_left("to write", self.work)
        return found

    def _shards(self) -> None:
        """Write the shards: a pass per split, shown as one in the progress."""
        pieces = self._pieces()
        total, done = sum(len(shards) for shards in pieces.values()), 0
        self._watch.began("write shards", total)
        for split, shards in pieces.items():
            tasks = (
                Task(
                    f"{split} shard {shard}",
                    {"do": "shard", "split": split, "shard": shard, "number": shard, "pieces": its},
                )
                for shard, its in shards.items()
            )
            self._stage(f"shards-{split}", None, tasks, done=done)
            done += len(shards)

    def _pieces(self) -> dict[str, dict[int, list[tuple[int, int, int]]]]:
        """Return split → shard → its pieces (block, batch in the block's file, rows)."""
        found: dict[str, dict[int, list[tuple[int, int, int]]]] = {name: {} for name in SPLITS}
        for number, facts in enumerate(self.desk.recall(SCATTER) or ()):
            for batch, (split, shard, rows) in enumerate(facts["pieces"]):
                found[SPLITS[split]].setdefault(shard, []).append((number, batch, rows))
        return {
            name: {shard: shards[shard] for shard in sorted(shards)}
            for name, shards in found.items()
            if shards
        }

    # ── the map ───────────────────────────────────────────────────────────────────────────────

    def _stage(
        self,
        stage: str,
        what: str | None,
        tasks: Iterable[Task],
        total: int | None = None,
        done: int = 0,
    ) -> list[Facts]:
        """Return the results of a pass, in the order of its tasks; run it unless it is complete."""
        known: list[Facts] | None = self.desk.recall(stage)
        if known is None:
            known = list(self._run(stage, tasks, what, total, done))
            self.desk.remember(stage, known)
        return known

    def _run(
        self,
        stage: str,
        tasks: Iterable[Task],
        what: str | None,
        total: int | None,
        done: int = 0,
    ) -> Iterator[Facts]:
        """Map the tasks over the pool. Tasks that were done before return their stored results."""
        self.desk.stage(stage)
        give_back_freed_memory()
        if what is not None:
            self._watch.began(what, total)
        staged = (task._replace(message={**task.message, "stage": stage}) for task in tasks)
        for facts in self._pool.map(staged):
            if self.recipe.bad == "refuse" and facts.get("bad"):
                raise DataError(facts["bad"])
            done += 1
            self._watch.advanced(done)
            yield facts

    def _partials(
        self, stage: str, suffix: str, numbers: list[int], run: Iterator[Facts]
    ) -> Iterator[Learnt]:
        """Yield what each block's look found, in block order, each as soon as its task is done."""
        for number in numbers:
            next(run, None)
            yield unpack(self.desk.path(stage, number, suffix).read_bytes())

    def _passed(self, what: str, at: int) -> int:
        """Return how many looks a step or feature has completed."""
        return self.desk.recall(f"learnt/{what}-{at}") or 0

    def _keep(
        self, what: str, at: int, passed: int, found: Learnt, partials: Iterator[Learnt]
    ) -> None:
        for _ in partials:  # `learn` may stop early, but every task of the pass must be run
            pass
        name = f"{what}-{at}"
        workdir.save(self.desk.stage("learnt") / f"{name}-{passed}", found)
        self.desk.remember(f"learnt/{name}", passed)


# Duplicates across blocks


def drop_repeated(work: Work, segment: Segment, stage: str, sizes: Sequence[int]) -> None:
    """Write for each block which of its rows repeat an earlier record, and where that one is.

    `sizes` are the rows of each block; records are numbered over all blocks.
    """
    assert segment.compares is not None
    desk = work.desk

    def hashes() -> Iterator[dict[str, Any]]:
        for number in range(len(sizes)):
            yield unpack(desk.path(segment.stage, number, "hash").read_bytes())

    found = comparing(work.steps[segment.compares]).duplicates(hashes(), desk.stage("scratch"))
    places = _Places(work, segment, sizes)
    desk.stage(stage)
    start = 0
    for number, size in enumerate(sizes):
        earlier = np.asarray(found[start : start + size])
        rows = np.flatnonzero(earlier >= 0)
        told = [f"repeats {where}" for where in places.of(earlier[rows])]
        desk.finish(stage, number, list(zip(rows.tolist(), told, strict=True)))
        start += size
    del found
    desk.clear("scratch")


class _Places:
    """Finds the file and line of a record by its number over all blocks."""

    def __init__(self, work: Work, segment: Segment, sizes: Sequence[int]) -> None:
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        self._rows = lru_cache(_OPEN)(lambda number: loaded(work.desk, segment.stage, number))

    def of(self, records: NDArray[np.int64]) -> list[str]:
        blocks = np.searchsorted(self._starts, records, "right") - 1
        found = []
        for record, block in zip(records.tolist(), blocks.tolist(), strict=True):
            file, line = self._rows(block).place(record - int(self._starts[block]))
            found.append(f"{file}:{line}")
        return found


_OPEN = 32
"""Blocks that stay mapped: duplicates are often near one another."""


# Errors for a preparation without records


def nothing_read(seen: Sequence[Block]) -> DataError:
    """Return the error for inputs without any readable record, with the first unreadable one."""
    whole = [block for block in seen if block.fault is None]
    told = next(filter(None, map(_unreadable, whole)), None)
    told = told or next((f"{b.file}: {b.fault}" for b in seen if b.fault), "the inputs are empty")
    return DataError(f"there is nothing to prepare: {told}")


def _unreadable(block: Block) -> str | None:
    names = block.source.options.columns or block.names or ()
    bad = parse(block, pa.schema([(name, pa.large_utf8()) for name in names])).bad
    count = sum(one.records for one in bad)
    return f"none of the first {count:,} records can be read; the first: {bad[0]}" if bad else None


def nothing_left(what: str, work: Work) -> DataError:
    """Return the error for "no records are left `what`".

    It says how many records each step took out, and quotes the first one.
    """
    counts = _counts(work)
    told = f"no records are left {what}"
    if counts:
        steps = ", ".join(f"{step} {count:,}" for step, count in counts.items())
        told += f": {sum(counts.values()):,} were taken out ({steps})"
        if first := _first_out(work):
            told += f"; the first: {first}"
    return DataError(told)


def _counts(work: Work) -> dict[str, int]:
    """Return how many records each step took out, for the steps that took out any."""
    found: dict[str, int] = {}
    for stage in _stages(work):
        for facts in work.desk.recall(stage) or ():
            added(found, facts["out"])
    return {step: count for step, count in found.items() if count}


def _first_out(work: Work) -> str | None:
    """Return place and reason of the first record of the quarantine."""
    for number in range(len(work.desk.recall(work.segments[0].stage) or ())):
        for stage in _stages(work):
            path = work.desk.path(stage, number, "jsonl")
            if path.exists() and path.stat().st_size:
                with path.open("rb") as file:
                    out = json.loads(file.readline())
                return f"{out['file']}:{out['line']}: {out['reason']}"
    return None


def _stages(work: Work) -> list[str]:
    return [*(segment.stage for segment in work.segments), SCATTER]
