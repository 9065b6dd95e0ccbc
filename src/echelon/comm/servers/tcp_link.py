"""A link between hosts: gradients leave chunk by chunk during backward, weights come back so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers.address import ShardAddress
from echelon.comm.servers.chunks import Cutting, Progress
from echelon.comm.servers.link import LOOK, Link, Terms
from echelon.comm.servers.messages import (
    CHUNK,
    MOST_CHUNKS,
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
        self._given: dict[int, Tensor] = {}

    def furnish(
        self, partition: Partition, gradients: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        """Whole flats, of which the shard's ranges are sent and received."""
        shard = self.address.index
        self._gradients = partition.cut(shard, gradients)
        self._weights = partition.cut(shard, weights)
        self._cutting = Cutting.of(partition, shard)
        self._progress = Progress(self._cutting)
        self._given = {}

    def give(self, at: int, gradient: Tensor) -> None:
        self._given[at] = gradient

    def ready(self, at: int) -> None:
        for number in self._progress.ready(at):
            if self._sender is None:
                self._sender = Sender(f"push-{self.address.index}")
            self._sender.submit(lambda number=number: self._send_chunk(number))  # type: ignore[misc]

    def push(self, seq: int, head: PushHead) -> None:
        rest = self._progress.rest()
        self._progress.begin()
        if self._sender is not None:
            self._flush(seq)
        bodies = [self._body(number) for number in rest]
        sizes = [sum(held.nbytes for held in body) for body in bodies]
        last = len(rest)
        size = 0
        while last and len(rest) - last < MOST_CHUNKS and size + sizes[last - 1] <= CHUNK:
            last -= 1
            size += sizes[last]
        for number in rest[:last]:
            self._send_chunk(number)
        full = head._replace(chunks=tuple(self._cutting.chunks[number] for number in rest[last:]))
        self.pushed += size
        body = [*chain.from_iterable(bodies[last:])]
        self.send(Kind.PUSH, pack_push(full), body, seq=seq, what=f"push {seq}")
        self._given = {}

    def _flush(self, seq: int) -> None:
        assert self._sender is not None
        start, what = time.monotonic(), f"the sending of push {seq}"
        while not self._sender.flush(LOOK):
            self._look(time.monotonic() - start, what)

    def _send_chunk(self, number: int) -> None:
        body = self._body(number)
        self.pushed += sum(held.nbytes for held in body)
        head = pack_chunk(self._cutting.chunks[number])
        self.send(Kind.GRADIENTS, head, body, what="gradients")

    def _body(self, number: int) -> list[Tensor]:
        """From where the gradients lie: what was given, or else the slots."""
        chunk = self._cutting.chunks[number]
        if not self._given:
            return [part(self._gradients, chunk)]
        found, place = [], chunk.start
        for at, start, size in self._cutting.stretches[number]:
            given = self._given.get(at)
            if given is None:
                found.append(self._gradients[chunk.range][place : place + size])
            else:
                found.append(given[start : start + size])
            place += size
        return found

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
