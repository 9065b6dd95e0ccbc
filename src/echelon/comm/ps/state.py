"""Checkpoint state ⇄ shards.

One shard's part of a cut: its ranges of weights and of optimizer state, and what goes with it.

On the wire `head` is plain data and `body` raw tensors, in the order in which `blank` makes them.
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
"""Values [start, stop) of a range had so many updates."""


State = dict[str, Any]


TENSORS = {"model", "optimizer"}
"""Of a strategy's state, what the shards divide among them. The rest is the gate's, as it is."""
MOST_KEYS = 8
_FROM_THE_START = {"sum"}
"""What an optimizer keeps before its first update, too (adagrad)."""


# Over the wire


def hand_out(
    links: Sequence[Link], partition: Partition, state: Mapping[str, Any], incarnation: int
) -> None:
    """Give every shard its part. They are of that incarnation once they are told that it is whole:
    rows of tables may follow."""
    rest = {key: value for key, value in state.items() if key not in TENSORS}
    for link, part in zip(links, divide(partition, state), strict=True):
        document = {"part": part.head(), "incarnation": incarnation, "gate": rest}
        link.ask(Kind.UPLOAD, {}, [to_bytes(document)], "the beginning of an upload")
        link.ask(Kind.STATE, {}, part.body(), "the end of an upload")


def collect(links: Sequence[Link], partition: Partition) -> dict[str, Any]:
    """All shards' parts by names, and what the gate adds to them."""
    gathering = Gathering(partition)
    for link in links:  # all begin before anybody is waited for
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


# By names


class Gathering:
    """Memory for a whole state, to receive all parts into without another copy."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._flats: dict[str, list[Tensor]] = {}

    def blank(self, shard: int, head: Any) -> Part:
        """The place for a shard's part."""
        return blank(self._partition, shard, head, functools.partial(self._cut, shard))

    def state(self, parts: Sequence[Part]) -> State:
        """By names, once all parts are here, in the order of shards."""
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
    """The state of parts that are at hand."""
    gathering = Gathering(partition)
    for shard, part in enumerate(parts):
        place = gathering.blank(shard, part.head())
        for mine, theirs in zip(place.body(), part.body(), strict=True):
            mine.copy_(theirs)
    return gathering.state(parts)


def divide(partition: Partition, state: Mapping[str, Any]) -> list[Part]:
    """Each shard's part of a state by names; of parameters without a state it is blank.

    Without "optimizer" all of them begin anew, with the job's own options.
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
            _named_runs(partition, shard, counts) if counted else [],
            options,
        )
        for shard in range(partition.shards)
    ]


def _counts(partition: Partition, parts: Sequence[Part]) -> list[float]:
    """Each parameter's updates; empty if nobody counts."""
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


def _named_runs(partition: Partition, shard: int, counts: Sequence[float]) -> list[list[Run]]:
    """Per range; the gap behind a parameter counts as the parameter does."""
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
    """What is kept for each parameter, and the options of both groups."""
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
    """One kind of state by names: None where there is no state at all."""
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


# One shard


@dataclass(frozen=True, slots=True)
class Part:
    weights: list[Tensor]
    """Per range."""
    state: dict[str, list[Tensor]]
    """What the optimizer keeps for each value (`exp_avg`, say), per range."""
    steps: list[list[Run]]
    """Per range; runs follow each other without gaps. Empty if the optimizer does not count."""
    groups: dict[str, dict[str, Any]]
    """`penalised` and `plain`: the optimizer's options, for those of the two that are held."""

    def head(self) -> dict[str, Any]:
        return {
            "keys": list(self.state),
            "steps": [[list(run) for run in runs] for runs in self.steps],
            "groups": self.groups,
        }

    def body(self) -> list[Tensor]:
        return [*self.weights, *(tensor for tensors in self.state.values() for tensor in tensors)]


class BadPart(PeerError):
    """A peer's part of the state makes no sense."""


def blank(
    partition: Partition, shard: int, head: Any, memory: Callable[[str], list[Tensor]] | None = None
) -> Part:
    """A part to receive `body` into, if `head` is one of this partition's.

    `memory`: for "" (the weights) and each key, the shard's ranges; new ones if not given.
    """
    match head:
        case {"keys": list(keys), "steps": list(steps), "groups": dict(groups)} if (
            len(keys) <= MOST_KEYS
            and all(isinstance(key, str) and key for key in keys)
            and len(set(keys)) == len(keys)
            and groups.keys() <= {"penalised", "plain"}
            and all(isinstance(options, dict) for options in groups.values())
        ):
            runs = _runs(partition, shard, steps)
        case _:
            raise BadPart("a part of the state must have keys, steps and groups")
    take = memory or (lambda _: partition.empty(shard))
    return Part(take(""), {key: take(key) for key in keys}, runs, groups)


def _runs(partition: Partition, shard: int, steps: list[Any]) -> list[list[Run]]:
    ranges = partition.ranges(shard)
    if not steps:
        return []
    if len(steps) != len(ranges):
        raise BadPart(f"a part of the state counts steps of {len(steps)} ranges, not {len(ranges)}")
    return [_checked(runs, held.size) for runs, held in zip(steps, ranges, strict=True)]


def _checked(runs: Any, size: int) -> list[Run]:
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
