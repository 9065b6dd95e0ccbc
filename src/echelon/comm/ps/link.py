"""`Link`: the connection of one trainer to one shard of a parameter server.

A `Link` is used on one host: gradients and weights lie in shared memory (the memory plane), and
only messages are sent. `TcpLink` is used between hosts: gradients leave chunk by chunk during
backward, sent by the thread of a `Sender`, and weights come back in chunks, too.

A link asks questions (`ask`, `call`), each with one answer, and takes part in updates (`ready`,
`push`, `outcome`). Calls raise `LostShard` if the shard cannot be reached or breaks the protocol.
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.comm.channel import Connection, Frame, Segment, connect
from echelon.comm.channel.frames import Buffer
from echelon.comm.ps import messages
from echelon.comm.ps.layout import Cutting, Partition, Progress
from echelon.comm.ps.messages import (
    CHUNK,
    MOST_CHUNKS,
    Kind,
    Outcome,
    PushHead,
    ShardAddress,
    pack_chunk,
    pack_push,
    part,
    unpack_chunk,
)
from echelon.core.errors import PeerError, TrainingError

LOOK = 0.3
"""Seconds between two looks whether a wait should go on."""
_LARGEST = 1 << 48  # bytes of a body
_UPDATES = (Kind.WEIGHTS, Kind.GIVEN, Kind.OUTCOME)
_SOCKETS = Path("/proc/net/unix")


class Terms:
    """Settings that all links of a trainer share, and the seconds that it waited for answers."""

    def __init__(
        self, key: bytes, member: int, plane: str, deadline: float, halted: Callable[[], str | None]
    ) -> None:
        assert plane in ("auto", "memory", "tcp"), plane
        self.key, self.member, self.plane = key, member, plane
        self.deadline, self.halted = deadline, halted
        self.waited = 0.0
        self.look: Callable[[str], None] = lambda _: None
        """Called during waits: raises if another shard is lost, so that no answer may come."""


def open_link(address: ShardAddress, terms: Terms) -> Link:
    """Connect to a shard, over its unix socket if it is on this host and `plane` allows it."""
    memory = terms.plane == "memory" or (terms.plane == "auto" and is_here(address.name))
    where = address.name if memory else (address.host, address.port)
    try:
        connection = connect(
            where,
            terms.key,
            role=f"trainer {terms.member}",
            deadline=terms.deadline,
            halted=terms.halted,
        )
    except PeerError as error:
        text = f"{address} cannot be reached: {error}; a conversation was to begin"
        raise LostShard(text, address.index) from None
    return (Link if memory else TcpLink)(address, connection, terms)


class Link:
    """A link of the memory plane: gradients and weights lie in memory that both ends share."""

    memory = True

    def __init__(self, address: ShardAddress, connection: Connection, terms: Terms) -> None:
        self.address, self._connection, self._terms = address, connection, terms
        connection.limit = _LARGEST  # `take` checks that a body has just the size expected
        self.member = terms.member
        self._asked = 0
        self._early: dict[int, Sequence[Tensor]] = {}
        """Per question of `begin_early`, where its answer belongs, which may come at any time."""
        self.pushed = self.pulled = 0
        """Bytes that were sent and received; shared memory does not count."""

    def __str__(self) -> str:
        return f"{self._connection.peer} (pid {self._connection.card.pid})"

    # Questions: one answer each.

    def ask(
        self,
        kind: Kind,
        head: Mapping[str, Any] | bytes = b"",
        body: Sequence[Buffer] = (),
        what: str = "",
    ) -> Frame:
        self.begin(kind, head, body, what)
        return self.answer(what)

    def begin(
        self,
        kind: Kind,
        head: Mapping[str, Any] | bytes = b"",
        body: Sequence[Buffer] = (),
        what: str = "",
    ) -> None:
        """Ask without waiting for the `answer` yet."""
        self._asked += 1
        self.send(kind, head, body, self._asked, what)

    def begin_early(
        self, kind: Kind, head: bytes, body: Sequence[Buffer], into: Sequence[Tensor], what: str
    ) -> int:
        """Ask for something that is needed later, and return the question's number.

        The answer is put `into` its place as soon as it is received, during any wait.
        """
        self.begin(kind, head, body, what)
        self._early[self._asked] = into
        return self._asked

    def finish_early(self, number: int, what: str) -> None:
        """Wait until the answer to this question is there. No other wait may be going on."""
        while number in self._early:
            self._put_early(self._receive(what), what)

    def _put_early(self, frame: Frame, what: str) -> bool:
        if frame.kind != Kind.ANSWER or frame.seq not in self._early:
            return False
        into = self._early.pop(frame.seq)
        if into:
            self.pulled += frame.size
            self.take(into, what)
        return True

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Ask a question by name, and return its answer, which is a JSON document."""
        what = f"an answer about {name}"
        frame = self.ask(Kind.CALL, {"name": name, **arguments}, what=what)
        return self.document(frame, what)

    def document(self, frame: Frame, what: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = messages.take(self._connection, frame)
        except PeerError as error:
            raise self._lost(error, f"{what} was awaited") from None
        return found

    def answer(self, what: str) -> Frame:
        """Wait for the answer to the last question.

        Skips answers that were never waited for, and messages of a push that was given up.
        """
        while (frame := self.receive(what)).kind in _UPDATES or 0 < frame.seq < self._asked:
            continue
        if frame.kind == Kind.REFUSED:
            raise TrainingError(f"{self} refused {what}: {frame.fields().get('reason', '')}")
        return self._expect(frame, Kind.ANSWER, what)

    def send(
        self,
        kind: Kind,
        head: Mapping[str, Any] | bytes = b"",
        body: Sequence[Buffer] = (),
        seq: int = 0,
        what: str = "",
    ) -> None:
        try:
            self._connection.send(kind, head, body, seq=seq)
        except PeerError as error:
            raise self._lost(error, f"{what} was being sent") from None

    def take(self, into: Sequence[Tensor], what: str) -> None:
        try:
            self._connection.take(into)
        except PeerError as error:
            raise self._lost(error, f"{what} was awaited") from None

    def receive(self, what: str) -> Frame:
        while self._put_early(frame := self._receive(what), what):
            continue
        return frame

    def _receive(self, what: str) -> Frame:
        start = time.monotonic()
        try:
            while True:
                if (frame := self._connection.receive(LOOK)) is not None:
                    return frame
                self._look(time.monotonic() - start, what)
        except PeerError as error:
            raise self._lost(error, f"{what} was awaited") from None
        finally:
            self._terms.waited += time.monotonic() - start

    def check(self, what: str) -> None:
        """Raise if the shard has closed the connection or ended."""
        if self._connection.fileno() < 0:  # closed by this end: a replica takes the shard's place
            return
        ends = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        poll = select.poll()
        poll.register(self._connection.fileno(), ends)
        if poll.poll(0):
            found = PeerError(f"{self._connection.peer} closed the connection or ended")
            raise self._lost(found, f"{what} was awaited")

    def _look(self, waited: float, what: str) -> None:
        self._terms.look(what)
        if (why := self._terms.halted()) is not None:
            raise Halted(f"{why}; {what} of {self} was awaited")
        if waited > self._terms.deadline:
            deadline = self._terms.deadline
            raise Halted(f"{self} did not answer within {deadline:g} s; {what} was awaited")

    def _lost(self, error: PeerError, what: str) -> PeerError:
        if isinstance(error, Halted | LostShard):
            return error
        shard, pid = self.address.index, self._connection.card.pid
        return LostShard(f"shard {shard} (pid {pid}) is lost: {error}; {what}", shard)

    def _expect(self, frame: Frame, kind: Kind, what: str) -> Frame:
        if frame.kind != kind:
            raise LostShard(
                f"{self} said {frame.kind} where {kind.name} was due; {what} was awaited",
                self.address.index,
            )
        return frame

    # Updates.

    def give(self, at: int, gradient: Tensor) -> None:
        """Use this gradient of parameter `at` instead of its slot, until the push is sent.

        For links between hosts only: on the memory plane, the shard reads the slots.
        """
        raise AssertionError(f"gradient {at} of {gradient.numel()} values is not in its slot")

    def ready(self, at: int) -> None:
        """Do nothing: the shard reads the slots once they are pushed."""

    def push(self, seq: int, head: PushHead) -> None:
        self.send(Kind.PUSH, pack_push(head), seq=seq, what=f"push {seq}")

    def outcome(self, seq: int) -> Outcome:
        """Wait for the outcome of a push. Only the gate sends one."""
        what = f"the outcome of push {seq}"
        return Outcome.unpack(self._weights_until(Kind.OUTCOME, seq, what).head)

    def given(self, seq: int) -> None:
        """Wait for this shard's part of the weights that come with an outcome."""
        self._weights_until(Kind.GIVEN, seq, f"the weights after push {seq}")

    def _weights_until(self, kind: Kind, seq: int, what: str) -> Frame:
        while (frame := self.receive(what)).seq < seq:  # an answer that came too late
            continue
        return self._expect(frame, kind, what)

    def hand_over(self, gradients: Segment, weights: Segment | None, size: int) -> Segment | None:
        """Show the shard this trainer's memory of gradients and weights.

        Without memory for weights, the trainer uses that of the shards: shard 0 hands over its
        segment of `size` bytes, the whole layout, which this returns.
        """
        what = "the memory's being mapped"
        self.begin(Kind.ROOM, {"shared": weights is None}, what=what)
        try:
            self._connection.send_segment(gradients)
            if weights is not None:
                self._connection.send_segment(weights)
            self.answer(what)
            if weights is None and self.address.index == 0:
                return self._connection.receive_segment(size)
        except PeerError as error:
            raise self._lost(error, f"{what} was awaited") from None
        return None

    def share(self, kind: Kind, head: Mapping[str, Any], segment: Segment, what: str) -> None:
        """Show the shard another segment of this trainer's memory."""
        self.begin(kind, head, what=what)
        try:
            self._connection.send_segment(segment)
        except PeerError as error:
            raise self._lost(error, f"{what} was awaited") from None
        self.answer(what)

    def close(self) -> None:
        self._part()
        self._connection.close()

    def _part(self) -> None:
        with suppress(PeerError):  # it is lost already
            self._connection.send(Kind.BYE)


class TcpLink(Link):
    """A link over TCP: gradients and weights lie in the trainer's own memory and are sent.

    Complete chunks leave during backward; the last ones travel in the PUSH message itself.
    """

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
        """Set the whole flats, of which the shard's ranges are sent and received."""
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
        """Return the tensors of a chunk: gradients that were given, and slots for the others."""
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
                if frame.size:  # a few weights travel with the answer itself
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


Job = Callable[[], None]


class Sender:
    """A thread that does one job after the other.

    After a failure it does no more jobs, and `flush` raises the error.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._open = 0
        self._thread = threading.Thread(target=self._work, name=f"echelon-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def flush(self, seconds: float) -> bool:
        """Wait for all jobs; return False if they are not done within so many seconds."""
        with self._idle:
            done = self._idle.wait_for(lambda: self._open == 0 or self._error is not None, seconds)
        if self._error is not None:
            raise self._error
        return done

    @property
    def busy(self) -> bool:
        return self._open > 0

    def close(self) -> None:
        """End the thread. Close the connection first, so that no job lasts."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised again by `flush`
                    self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def is_here(name: str) -> bool:
    """Return whether a process of this host listens at this abstract unix socket."""
    if not name:
        return False
    lines = _SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.endswith(f" @{name}") for line in lines)


class Halted(PeerError):
    """A wait ended because of `Terms.halted` or the deadline, not because the shard is lost."""


class LostShard(PeerError):
    """A shard cannot be reached, or breaks the protocol."""

    def __init__(self, message: str, shard: int) -> None:
        super().__init__(message)
        self.shard = shard
