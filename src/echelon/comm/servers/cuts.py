"""Cuts over the wire: the state by names, divided over the shards or gathered from them.

    trainer ── UPLOAD {what it is} ──▶ shard ── ANSWER ──▶  STATE, raw tensors ──▶ ANSWER
    trainer ── STATE ────────────────▶ shard ── ANSWER {what it is} ── ANSWER, raw tensors ──▶

The gate's part (versions, what was applied, the schedule) travels with shard 0's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.comm.servers.documents import to_bytes
from echelon.comm.servers.link import Link
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.names import Gathering, divide
from echelon.comm.servers.part import Part
from echelon.comm.servers.partition import Partition

TENSORS = {"model", "optimizer"}
"""Of a strategy's state, what the shards divide among them. The rest is the gate's, as it is."""


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
