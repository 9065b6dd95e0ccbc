"""What a shard is set up with: a part of the parameters, and the rules they are trained by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from echelon.comm.channel import Segment
from echelon.comm.servers.documents import to_bytes
from echelon.comm.servers.layout import Layout
from echelon.comm.servers.messages import CHUNK
from echelon.comm.servers.partition import Partition
from echelon.comm.servers.room import Room
from echelon.core.config import OptimizerSection
from echelon.core.errors import PeerError
from echelon.server.flats import Flats
from echelon.server.tables import Tables

Lender = Callable[[int], Segment | None]
"""Memory of so many bytes for all shards' weights; None: there is none to be had."""


class Holding:
    """A shard's part of the weights, and where it lies."""

    def __init__(self, shard: int, shards: int, document: Any, lender: Lender) -> None:
        match document:
            case {"layout": list(layout), "rules": {"optimizer": dict(optimizer), **_rest}}:
                self.layout = Layout.from_json(layout)
                self.rules: Mapping[str, Any] = document["rules"]
            case _:
                raise PeerError("a set-up must have a layout and rules")
        self.digest = digest_of(document)
        self.document = document
        self.shard = shard
        self.partition = Partition(self.layout, shards)
        self.together = self._is_together()
        self.replicated = bool(self.rules.get("replicas", 0))
        seen = (self.together or self.rules.get("live") is True) and not self.replicated
        self.segment = lender(self.layout.bytes) if seen else None
        weights = None
        if self.segment is not None:
            room = Room(self.layout, self.segment.tensor)
            weights = self.partition.cut(shard, room.flats)
        section = OptimizerSection.model_validate(optimizer)
        piece = CHUNK if weights is None else 2 * CHUNK  # nothing has to be under way meanwhile
        self.flats = Flats(self.partition, shard, section, weights, piece)
        self.tables = Tables(self.rules.get("tables", []))

    @property
    def weights(self) -> Sequence[Tensor]:
        return self.flats.weights

    @property
    def shared(self) -> bool:
        """Whether trainers of this host see these weights themselves."""
        return self.segment is not None

    def cut(self, memory: Tensor) -> list[Tensor]:
        """This shard's ranges in a trainer's memory for the whole layout."""
        return self.partition.cut(self.shard, Room(self.layout, memory).flats)

    def _is_together(self) -> bool:
        """Whether nobody computes while an update is made."""
        return self.rules.get("staleness", 0) == 0 and self.rules.get("quorum") in (None, "all")


def digest_of(document: Any) -> str:
    return hashlib.sha256(to_bytes(document)).hexdigest()
