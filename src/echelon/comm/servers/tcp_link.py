"""A link between hosts: gradients leave chunk by chunk during backward, weights come back so."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers.address import ShardAddress
from echelon.comm.servers.chunks import Cutting, Progress
from echelon.comm.servers.link import LOOK, Link, Terms
from echelon.comm.servers.messages import (
    CHUNK,
    MOST_CHUNKS,
    Chunk,
    Kind,
    PushHead,
    pack_chunk,
    pack_push,
    part,
    unpack_chunk,
)
from echelon.comm.servers.partition import Partition
from echelon.comm.servers.sender import Sender


class TcpLink(Link):
    """Gradients and weights are the trainer's own memory; a shard has its copies."""

    memory = False

    def __init__(self, address: ShardAddress, connection: Connection, terms: Terms) -> None:
        super().__init__(address, connection, terms)
        self._sender: Sender | None = None
        self._gradients: list[Tensor] = []
        self._weights: list[Tensor] = []

    def furnish(
        self, partition: Partition, gradients: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        """Whole flats, of which the shard's ranges are sent and received."""
        shard = self.address.index
        self._gradients = partition.cut(shard, gradients)
        self._weights = partition.cut(shard, weights)
        self._progress = Progress(Cutting.of(partition, shard))

    def ready(self, at: int) -> None:
        for chunk in self._progress.ready(at):
            if self._sender is None:
                self._sender = Sender(f"push-{self.address.index}")
            self._sender.submit(lambda chunk=chunk: self._send_chunk(chunk))  # type: ignore[misc]

    def push(self, seq: int, head: PushHead) -> None:
        rest = self._progress.rest()
        self._progress.begin()
        if self._sender is not None:
            self._flush(seq)
        bodies = [part(self._gradients, chunk) for chunk in rest]
        last = len(rest)
        size = 0
        while last and len(rest) - last < MOST_CHUNKS and size + bodies[last - 1].nbytes <= CHUNK:
            last -= 1
            size += bodies[last].nbytes
        for chunk in rest[:last]:
            self._send_chunk(chunk)
        full = head._replace(chunks=tuple(rest[last:]))
        self.pushed += size
        self.send(Kind.PUSH, pack_push(full), bodies[last:], seq=seq, what=f"push {seq}")

    def _flush(self, seq: int) -> None:
        assert self._sender is not None
        start, what = time.monotonic(), f"the sending of push {seq}"
        while not self._sender.flush(LOOK):
            self._look(time.monotonic() - start, what)

    def _send_chunk(self, chunk: Chunk) -> None:
        body = part(self._gradients, chunk)
        self.pushed += body.nbytes
        self.send(Kind.GRADIENTS, pack_chunk(chunk), [body], what="gradients")

    def _weights_until(self, kind: Kind, seq: int, what: str) -> Frame:
        while True:
            frame = self.receive(what)
            if frame.kind == Kind.WEIGHTS:
                into = part(self._weights, unpack_chunk(frame.head))
                self.pulled += into.nbytes
                self.take([into], what)
            elif frame.seq >= seq:
                self._expect(frame, kind, what)
                if frame.size:  # few weights travel with the answer itself
                    self.pulled += frame.size
                    self.take(self._weights, what)
                return frame

    def _part(self) -> None:
        if self._sender is None or not self._sender.busy:
            super()._part()

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
