"""The state of a strategy, divided over the shards or gathered from them.

Every strategy saves its state by parameter name:

    {"model": {name: tensor},
     "optimizer": {"state": {name: {key: tensor}}, "groups": [{option: value, "names": […]}]}}

Here `model` has the trained parameters only: the servers do not know the rest of a model.

A shard has a `Part` of it: its ranges of weights and optimizer state. `hand_out` uploads all parts
and `collect` gathers them; the gate's part (versions, what was applied, the schedule) travels with
shard 0's:

    trainer ── UPLOAD head ──▶ shard ── ANSWER ──▶  STATE, raw tensors ──▶ ANSWER
    trainer ── CUT ──────────▶ shard ── ANSWER head ── ANSWER, raw tensors ──▶

The tensors (`Part.body`) come in the order in which `blank` makes them from the head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.comm.ps.layout import Layout, Partition, Slot
from echelon.comm.ps.link import Link
from echelon.comm.ps.messages import Kind, to_bytes
from echelon.core.errors import CheckpointError, PeerError

Run = tuple[int, int, float]
"""(start, stop, count): values [start, stop) of a range have had `count` updates."""
State = dict[str, Any]
"""A strategy's state by parameter name."""
TENSORS = {"model", "optimizer"}
"""Keys of a strategy's state that are divided over the shards. The gate has the others."""
MOST_KEYS = 8
_FROM_THE_START = {"sum"}
"""Optimizer state that exists before the first update, too (Adagrad)."""


def hand_out(
    links: Sequence[Link], partition: Partition, state: Mapping[str, Any], incarnation: int
) -> None:
    """Upload every shard's part. Rows of tables may follow.

    The shards use it as `incarnation` once they get the call `uploaded`.
    """
    rest = {key: value for key, value in state.items() if key not in TENSORS}
    for link, part in zip(links, divide(partition, state), strict=True):
        document = {"part": part.head(), "incarnation": incarnation, "gate": rest}
        link.ask(Kind.UPLOAD, {}, [to_bytes(document)], "the beginning of an upload")
        link.ask(Kind.STATE, {}, part.body(), "the end of an upload")


def collect(links: Sequence[Link], partition: Partition) -> dict[str, Any]:
    """Return the state gathered from all shards, and the gate's keys."""
    gathering = Gathering(partition)
    for link in links:  # all shards begin before the first answer is awaited
        link.begin(Kind.CUT, what="a cut")
    parts: list[Part] = []
    rest: dict[str, Any] = {}
    for link in links:
        found = link.document(link.answer("what a cut is"), "what a cut is")
        part = gathering.blank(link.address.index, found["part"])
        link.answer("the tensors of a cut")
        link.take(part.body(), "the tensors of a cut")
        parts.append(part)
        rest = rest or found["gate"]
    return gathering.state(parts) | rest


class Gathering:
    """Memory for a whole state, into which all parts are received without another copy."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._flats: dict[str, list[Tensor]] = {}

    def blank(self, shard: int, head: Any) -> Part:
        """Return the place for a shard's part."""
        return blank(self._partition, shard, head, functools.partial(self._cut, shard))

    def state(self, parts: Sequence[Part]) -> State:
        """Return the state by names from all parts, in the order of shards."""
        layout = self._partition.layout
        keys = dict.fromkeys(key for part in parts for key in part.state)
        views = {key: layout.views(self._whole(key)) for key in ("", *keys)}
        names = [slot.name for slot in layout.slots]
        counts = _counts(self._partition, parts)
        kept: dict[str, dict[str, Tensor]] = {}
        for at, name in enumerate(names):
            if not keys or (counts and counts[at] == 0 and not keys.keys() & _FROM_THE_START):
                continue
            count = {"step": torch.tensor(counts[at], dtype=torch.float32)} if counts else {}
            kept[name] = count | {key: views[key][at] for key in keys}
        optimizer = {"state": kept, "groups": _groups(layout, parts)}
        return {"model": dict(zip(names, views[""], strict=True)), "optimizer": optimizer}

    def _cut(self, shard: int, key: str) -> list[Tensor]:
        return self._partition.cut(shard, self._whole(key))

    def _whole(self, key: str) -> list[Tensor]:
        if key not in self._flats:
            self._flats[key] = self._partition.layout.empty()
        return self._flats[key]


def join(partition: Partition, parts: Sequence[Part]) -> State:
    """Return the state by names from copies of all parts."""
    gathering = Gathering(partition)
    for shard, part in enumerate(parts):
        place = gathering.blank(shard, part.head())
        for mine, theirs in zip(place.body(), part.body(), strict=True):
            mine.copy_(theirs)
    return gathering.state(parts)


def divide(partition: Partition, state: Mapping[str, Any]) -> list[Part]:
    """Return each shard's part of a state by names.

    Parameters without optimizer state get zeros. Without "optimizer", all of them do, and the
    optimizer has the options of the job.
    """
    layout = partition.layout
    weights = _filled(layout, "weights", {s.name: state["model"].get(s.name) for s in layout.slots})
    saved, options = _optimizer(layout, state.get("optimizer"))
    keys = sorted({key for values in saved.values() for key in values} - {"step"})
    flats = {key: _filled(layout, key, _column(layout, saved, key)) for key in keys}
    counts = [float(saved.get(slot.name, {}).get("step", 0.0)) for slot in layout.slots]
    counted = any("step" in values for values in saved.values())
    return [
        Part(
            partition.cut(shard, weights),
            {key: partition.cut(shard, whole) for key, whole in flats.items()},
            _runs_of_shard(partition, shard, counts) if counted else [],
            options,
        )
        for shard in range(partition.shards)
    ]


def _counts(partition: Partition, parts: Sequence[Part]) -> list[float]:
    """Return each parameter's number of updates; empty if the optimizer does not count."""
    if not any(part.steps for part in parts):
        return []
    found = []
    for at in range(len(partition.layout.slots)):
        pieces = partition.pieces(at)
        if not pieces:  # a parameter without values
            found.append(0.0)
            continue
        runs = parts[pieces[0].shard].steps[pieces[0].range]
        place = pieces[0].offset
        found.append(next(count for start, stop, count in runs if start <= place < stop))
    return found


def _runs_of_shard(partition: Partition, shard: int, counts: Sequence[float]) -> list[list[Run]]:
    """Return the runs of each range of a shard; a gap counts like the parameter before it."""
    found: list[list[Run]] = [[] for _ in partition.ranges(shard)]
    for at, count in enumerate(counts):
        for piece in partition.pieces(at):
            if piece.shard == shard:
                runs = found[piece.range]
                if runs and runs[-1][2] == count:
                    runs[-1] = (runs[-1][0], piece.offset + piece.size, count)
                else:
                    start = runs[-1][1] if runs else 0
                    runs.append((start, piece.offset + piece.size, count))
    for runs, held in zip(found, partition.ranges(shard), strict=True):
        start, _, count = runs.pop() if runs else (0, 0, 0.0)
        runs.append((start, held.size, count))
    return found


def _groups(layout: Layout, parts: Sequence[Part]) -> list[dict[str, Any]]:
    found = []
    for kind in (True, False):
        names = [slot.name for slot in layout.slots if slot.penalised is kind]
        held = [part.groups[group_word(kind)] for part in parts if group_word(kind) in part.groups]
        if names and held:
            plain = {k: tuple(v) if isinstance(v, list) else v for k, v in held[0].items()}
            found.append(plain | {"names": names})
    return found


def _optimizer(layout: Layout, saved: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the state of each parameter, and the options of both groups."""
    if saved is None:
        return {}, {}
    if not isinstance(saved, Mapping) or saved.keys() != {"state", "groups"}:
        raise CheckpointError("optimizer state must have the keys 'state' and 'groups'")
    known = {slot.name for slot in layout.slots}
    if odd := sorted(saved["state"].keys() - known):
        raise CheckpointError(f"optimizer state has {odd[0]!r}, which is not trained here")
    options = {
        group_word(kind): _options(names, saved["groups"])
        for kind in (True, False)
        if (names := {slot.name for slot in layout.slots if slot.penalised is kind})
    }
    return dict(saved["state"]), options


def _options(names: set[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for group in groups:
        common = names & set(group.get("names", ()))
        if common == names:
            return {key: value for key, value in group.items() if key != "names"}
        if common:
            raise CheckpointError(
                f"optimizer state groups {min(common)!r} apart from {min(names - common)!r}: "
                f"was it saved with other penalties?"
            )
    raise CheckpointError(f"optimizer state lacks {min(names)!r} of this model")


def _column(layout: Layout, saved: Mapping[str, Any], key: str) -> dict[str, Tensor | None]:
    """Return one kind of state by names, with None for a parameter that has no state at all."""
    found: dict[str, Tensor | None] = {}
    for slot in layout.slots:
        values = saved.get(slot.name)
        if values and key not in values:
            raise CheckpointError(f"optimizer state of {slot.name!r} lacks {key}")
        found[slot.name] = values[key] if values else None
    return found


def _filled(layout: Layout, what: str, named: Mapping[str, Tensor | None]) -> list[Tensor]:
    flats = layout.empty()
    for slot, place in zip(layout.slots, layout.views(flats), strict=True):
        values = named[slot.name]
        if values is None and what == "weights":
            raise CheckpointError(f"the checkpoint does not fit the model: it lacks {slot.name!r}")
        if values is not None:
            place.copy_(_fitting(slot, what, values).detach())
    return flats


def _fitting(slot: Slot, what: str, values: Tensor) -> Tensor:
    if tuple(values.shape) != slot.shape:
        raise CheckpointError(
            f"{what} of {slot.name!r} are {tuple(values.shape)}, but the parameter is {slot.shape}"
        )
    return values


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's part of the state. On the wire `head` is plain data and `body` raw tensors."""

    weights: list[Tensor]
    """Per range."""
    state: dict[str, list[Tensor]]
    """Per key of optimizer state, such as `exp_avg`, its values per range."""
    steps: list[list[Run]]
    """Per range, runs without gaps between them. Empty if the optimizer does not count."""
    groups: dict[str, dict[str, Any]]
    """The optimizer's options per group (`penalised`, `plain`), for the groups that exist."""

    def head(self) -> dict[str, Any]:
        return {
            "keys": list(self.state),
            "steps": [[list(run) for run in runs] for runs in self.steps],
            "groups": self.groups,
        }

    def body(self) -> list[Tensor]:
        return [*self.weights, *(tensor for tensors in self.state.values() for tensor in tensors)]


class BadPart(PeerError):
    """A part that came from a peer is invalid."""


def blank(
    partition: Partition, shard: int, head: Any, memory: Callable[[str], list[Tensor]] | None = None
) -> Part:
    """Return a part to receive a body into; BadPart if `head` does not fit the partition.

    `memory` returns the shard's ranges for "" (the weights) and for each key; default: new ones.
    """
    match head:
        case {"keys": list(keys), "steps": list(steps), "groups": dict(groups)} if (
            len(keys) <= MOST_KEYS
            and all(isinstance(key, str) and key for key in keys)
            and len(set(keys)) == len(keys)
            and groups.keys() <= {"penalised", "plain"}
            and all(isinstance(options, dict) for options in groups.values())
        ):
            runs = _read_runs(partition, shard, steps)
        case _:
            raise BadPart("a part of the state must have keys, steps and groups")
    take = memory or (lambda _: partition.empty(shard))
    return Part(take(""), {key: take(key) for key in keys}, runs, groups)


def _read_runs(partition: Partition, shard: int, steps: list[Any]) -> list[list[Run]]:
    ranges = partition.ranges(shard)
    if not steps:
        return []
    if len(steps) != len(ranges):
        raise BadPart(f"a part of the state counts steps of {len(steps)} ranges, not {len(ranges)}")
    return [_checked_runs(runs, held.size) for runs, held in zip(steps, ranges, strict=True)]


def _checked_runs(runs: Any, size: int) -> list[Run]:
    found: list[Run] = []
    end = 0
    for run in runs if isinstance(runs, list) else [None]:
        match run:
            case [int(start), int(stop), int() | float() as count] if start == end < stop <= size:
                found.append((start, stop, float(count)))
                end = stop
            case _:
                break
    if end != size or len(found) != len(runs):
        raise BadPart("a part of the state counts steps of other values than it has")
    return found


def group_word(penalised: bool) -> str:
    return "penalised" if penalised else "plain"
