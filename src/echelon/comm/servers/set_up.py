"""The first words between a trainer and the shards: what is trained, by which rules, and where.

trainer                          shard 0                     shard k
SET_UP layout, rules  ─────────▶ the first one makes it so; the others have to say the same
SET_UP layout, rules  ─────────────────────────────────────▶ (asks shard 0 for its memory)
◀────────────────────── ANSWER pid, incarnation, version, shared
ROOM + segments       ─────────▶ mapped                      mapped          memory plane alone
◀────────────────────── ANSWER (+ the weights' segment, of shard 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from echelon.comm.channel import Segment
from echelon.comm.servers.address import ShardAddress
from echelon.comm.servers.documents import to_bytes
from echelon.comm.servers.layout import Layout
from echelon.comm.servers.link import Link, LostShard, Terms, dial
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.partition import Partition
from echelon.comm.servers.room import Room
from echelon.comm.servers.tcp_link import TcpLink


class Plan(NamedTuple):
    """What a trainer says first."""

    partition: Partition
    document: bytes

    @classmethod
    def of(cls, layout: Layout, shards: int, rules: Mapping[str, Any]) -> Plan:
        document = {"layout": layout.to_json(), "rules": dict(rules)}
        return cls(Partition(layout, shards), to_bytes(document))


class Ready(NamedTuple):
    """What a shard answers."""

    incarnation: int
    """Of which upload its weights are; 0: it has none."""
    version: int
    shared: bool
    """Whether its weights lie in memory that trainers of its host may map."""


def open_link(address: ShardAddress, terms: Terms) -> Link:
    connection, memory = dial(address, terms)
    return (Link if memory else TcpLink)(address, connection, terms)


def introduce(link: Link, plan: Plan) -> Ready:
    frame = link.ask(
        Kind.SET_UP, {"member": link.member}, [plan.document], "the answer to the set-up"
    )
    match frame.fields():
        case {"incarnation": int(incarnation), "version": int(version), "shared": bool(shared)}:
            return Ready(incarnation, version, shared)
    raise LostShard(f"{link} gave an answer to the set-up that makes no sense", link.address.index)


class Rooms:
    """This trainer's gradients and weights. Segments stay open: another process may have to be
    shown them, when a shard moves."""

    def __init__(self, layout: Layout, links: Sequence[Link], *, shared: bool) -> None:
        self._layout = layout
        size = layout.bytes
        memory = any(link.memory for link in links)
        self.shared = shared
        self._gradients = Segment.create(size) if memory else None
        self._weights = Segment.create(size) if memory and not shared else None
        self.gradients = self._room(self._gradients)
        self.gradients.clear()  # the gaps between parameters have to be zeros
        self.weights = self._room(self._weights) if not shared else self.gradients

    def show(self, link: Link, partition: Partition) -> None:
        """Let this link's shard know where to read and write."""
        if isinstance(link, TcpLink):
            link.furnish(partition, self.gradients.flats, self.weights.flats)
            return
        assert self._gradients is not None
        theirs = link.hand_over(self._gradients, self._weights, self._layout.bytes)
        if theirs is not None:
            self.weights = Room(self._layout, theirs.tensor)
            theirs.close()

    def close(self) -> None:
        for segment in (self._gradients, self._weights):
            if segment is not None:
                segment.close()

    def _room(self, segment: Segment | None) -> Room:
        return Room(self._layout, None if segment is None else segment.tensor)
