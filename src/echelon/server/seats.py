"""A trainer's seat at a shard: where its gradients are staged, and how it gets weights.

Seat         trainer and shard see the same gradients and weights                       no copy
PinnedSeat   the same gradients, but the trainer has weights of its own: copied while they are
             in the cache
WireSeat     gradients are received and weights are sent, chunk by chunk
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.ps.link import Sender
from echelon.comm.ps.messages import CHUNK, Chunk, Kind, pack_chunk, part
from echelon.core.errors import PeerError
from echelon.server.weights import Done


class Seat:
    """A seat in shared memory: `gradients` per range of this shard. Nothing has to be sent."""

    base: Sequence[Tensor] | None = None
    """The weights that the trainer computes with, if the shard keeps them: stale gradients are
    compensated by them."""
    chunked = False
    """Whether `done` and `whole` do anything."""

    def __init__(self, connection: Connection, gradients: Sequence[Tensor]) -> None:
        self.gradients = list(gradients)
        self._connection = connection

    def stage(self, chunks: Sequence[Chunk], frame: Frame) -> None:
        """Receive the gradients of these chunks from the body of a frame."""
        if chunks or frame.size:
            raise PeerError("gradients were sent that are in shared memory")

    def moved(self, weights: Sequence[Tensor]) -> None:
        """Read the shard's weights in other memory from now on."""

    def done(self, chunk: Done) -> None:
        """Pass on a chunk of new weights."""

    def whole(self) -> None:
        """Pass on all weights, in place of `done` for every chunk."""

    def tell(self, kind: Kind, seq: int, head: bytes) -> None:
        """Send the answer to a push or pull, behind the weights."""
        self._connection.send(kind, head, seq=seq)

    def refuse(self, seq: int, head: bytes) -> None:
        """Send an outcome without weights."""
        self._connection.send(Kind.OUTCOME, head, seq=seq)

    def hang_up(self) -> None:
        """Close the connection. The session's thread notices and cleans up."""
        self._connection.close()

    def close(self) -> None:
        """Free what the seat itself holds. The connection is closed already."""


class PinnedSeat(Seat):
    """A seat whose trainer has its own copy of the weights (`theirs`), in shared memory."""

    chunked = True

    def __init__(
        self,
        connection: Connection,
        gradients: Sequence[Tensor],
        theirs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        super().__init__(connection, gradients)
        self.base = self._theirs = list(theirs)
        self._weights = weights

    def moved(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights

    def done(self, chunk: Done) -> None:
        at, start, stop = chunk
        self._theirs[at][start:stop].copy_(self._weights[at][start:stop])

    def whole(self) -> None:
        torch._foreach_copy_(self._theirs, list(self._weights))


class WireSeat(Seat):
    """A seat whose gradients and weights travel over the connection.

    `apart`: other trainers' updates go on while weights are sent, so a copy is sent.

    Weights that fit one message travel with the answer. Larger ones are sent by a thread of their
    own while the update goes on; the answer follows them through the same thread.
    """

    chunked = True

    def __init__(
        self,
        connection: Connection,
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        apart: bool,
    ) -> None:
        super().__init__(connection, gradients)
        self._sent = [w.clone() for w in weights] if apart else []
        self._apart = apart
        if apart:
            self.base = self._sent
        self.moved(weights)
        self._small = sum(w.nbytes for w in weights) <= CHUNK
        self._sender: Sender | None = None
        self._open: Chunk | None = None

    def moved(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        if not self._apart:
            self._sent = self._weights

    def stage(self, chunks: Sequence[Chunk], frame: Frame) -> None:
        if chunks or frame.size:
            self._connection.take([part(self.gradients, chunk) for chunk in chunks])

    def done(self, chunk: Done) -> None:
        at, start, stop = chunk
        if self._apart:
            self._sent[at][start:stop].copy_(self._weights[at][start:stop])
        if not self._small:
            self._extend(Chunk(at, start, stop))

    def whole(self) -> None:
        if self._apart:
            torch._foreach_copy_(self._sent, self._weights)
        if not self._small:
            for at, held in enumerate(self._sent):
                step = CHUNK // held.itemsize
                for start in range(0, held.numel(), step):
                    self._extend(Chunk(at, start, min(start + step, held.numel())))

    def tell(self, kind: Kind, seq: int, head: bytes) -> None:
        if self._small:
            self._connection.send(kind, head, self._sent, seq=seq)
            return
        self._send_open()
        self._background.submit(lambda: self._connection.send(kind, head, seq=seq))

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _extend(self, chunk: Chunk) -> None:
        """Join a chunk to the one before it, up to a message's size; else send that one first."""
        before = self._open
        if before is not None:
            size = (chunk.stop - before.start) * self._sent[chunk.range].itemsize
            if before.range == chunk.range and before.stop == chunk.start and size <= CHUNK:
                chunk = Chunk(chunk.range, before.start, chunk.stop)
            else:
                self._send_open()
        self._open = chunk

    def _send_open(self) -> None:
        if self._open is not None:
            chunk, self._open = self._open, None
            body = [part(self._sent, chunk)]
            head = pack_chunk(chunk)
            self._background.submit(lambda: self._connection.send(Kind.WEIGHTS, head, body))

    @property
    def _background(self) -> Sender:
        if self._sender is None:
            self._sender = Sender("weights")
        return self._sender
