"""What a worker knows, and how it does a task it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare import learnt, passes
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.columns import Columns, rows, take_all
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.inputs import Input, Source
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.outline import Outline
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.segments import segments
from echelon.data.prepare.splits import Mixing

SCHEMA = "schema.arrow"


def one_thread() -> None:
    """In a worker Arrow does its work where it is called, and keeps memory as all else does: its
    own allocators give back far more than they keep."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    pa.set_memory_pool(pa.system_memory_pool())


class Work:
    """The recipe, the desk, and what was learnt so far."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.recipe = Recipe.model_validate(setting["recipe"])
        self.desk = Desk(Path(setting["desk"]))
        self.steps = self.recipe.steps()
        self.features = self.recipe.made()
        self.segments = segments(self.steps)
        self._learnt: dict[str, Learnt] = {}

    @cached_property
    def schema(self) -> pa.Schema:
        """What is read: it is known by the first task."""
        return pa.ipc.read_schema(pa.py_buffer((self.desk.root / SCHEMA).read_bytes()))

    @cached_property
    def outline(self) -> Outline:
        return Outline(self.recipe, self.schema, self.steps, self.features)

    @cached_property
    def mixing(self) -> Mixing:
        """Known once there is a plan."""
        plan = self.desk.recall("plan")
        assert plan is not None, "planned before"
        return Mixing(plan["written"], plan["shards"], self.recipe.seed)

    def do(self, task: Mapping[str, Any], data: memoryview) -> Any:
        """Do it, unless it was done; what comes of it is small."""
        stage, number = task["stage"], task["number"]
        done = self.desk.result(stage, number)
        if done is None:
            done = self.desk.finish(stage, number, self._do(task, data))
        return done

    def _do(self, task: Mapping[str, Any], data: memoryview) -> Any:
        number = task["number"]
        match task["do"]:
            case "clean":
                block = block_from(task["block"], data) if task["block"] else None
                segment = self.segments[task["segment"]]
                return passes.clean_block(self, segment, number, block, task["split"])
            case "look-clean":
                segment = self.segments[task["segment"]]
                return passes.look_clean(self, segment, number, task["at"])
            case "look":
                return passes.look_block(self, task["stage"], number, task["active"])
            case "encode":
                from echelon.data.prepare.scatter import encode_block

                return encode_block(self, number)
            case "shard":
                from echelon.data.prepare.shard import write_shard

                return write_shard(self, task["split"], task["shard"], task["pieces"])
        raise AssertionError(task["do"])

    def learnt_of(self, what: str, at: int) -> Learnt:
        """What a step or a feature has learnt up to now; kept, unless there is something newer."""
        name = f"{what}-{at}"
        passed = self.desk.recall(f"learnt/{name}")
        if passed is None:
            return {}
        key = f"{name}/{passed}"
        if key not in self._learnt:
            self._learnt[key] = learnt.load(self.desk.root / "learnt" / key.replace("/", "-"))
        return self._learnt[key]

    def visible(self, block: Columns, targets: set[int]) -> dict[int, Columns]:
        """The columns that each of these features sees: raw ones, and those made before it."""
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


def stays(columns: Columns, gone: Mapping[int, str]) -> Any:
    """The rows that are not gone."""
    left = np.ones(rows(next(iter(columns.values()))), np.bool_)
    left[list(gone)] = False
    return np.flatnonzero(left)


def block_to(block: Block) -> dict[str, Any]:
    """A block as plain values, without its bytes."""
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
    """What `block_to` was given."""
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
