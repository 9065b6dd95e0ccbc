"""Reads the samples of leases as batches, some ahead of their use.

    leases ─▶ chunks of leases ─▶ this worker's rows (order) ─▶ gather ─▶ augment ─▶ batches
                              └── in a second thread, if that saves time (`ahead`) ──┘

Everything about one sample is a function of (seed, epoch, position): which row it is, and which
random numbers its augmentation draws (`PositionDraws`). So neither the number of workers nor the
number of leases per chunk changes a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, pairwise
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.hashing import key, words
from echelon.core.interfaces import Augment, BatchSource
from echelon.core.types import Batch, Lease, Shard
from echelon.data import batch as batches
from echelon.data.ledger import edges
from echelon.data.order import Order, Rows
from echelon.data.sources import chunkable

Micro: TypeAlias = "list[Batch]"
"""The micro-batches of one lease."""
CHUNK_BYTES = 1 << 20
CHUNK_LEASES = 256
"""Leases are read many at a time, up to these limits, because the fixed cost of a gather, some tens
of µs, is high for small batches. The batches are views of one gather; its memory is not reused."""


class Loader:
    """The reader of a worker's samples. A batch is a pure function of (seed, lease, shard)."""

    def __init__(
        self,
        source: BatchSource,
        *,
        seed: int,
        shuffle: bool = True,
        augment: Augment | None = None,
        prefetch: int = 2,
        micro: int = 1,
        shard: Shard = Shard(),  # noqa: B008 (a constant)
        device: torch.device | None = None,
    ) -> None:
        assert micro > 0, f"{micro} micro-batches"
        self.source = source
        self._seed = seed
        self._shuffle = shuffle
        self._augment = augment
        self._prefetch = prefetch
        self._micro = micro
        self.shard = shard
        self._device = device
        self._order: tuple[int, Order] | None = None

    @property
    def shard(self) -> Shard:
        """Which part of each lease is read. Change it only between two streams."""
        return self._shard

    @shard.setter
    def shard(self, shard: Shard) -> None:
        assert 0 <= shard.index < shard.count, f"{shard} is not a part of a batch"
        self._shard = shard
        # The most samples in a chunk; unknown (0) until the first chunk is read.
        self._chunk = 0

    def read(self, lease: Lease) -> Micro:
        """Return the micro-batches of this lease; fewer, or none, if it has too few samples."""
        return self._read([lease])[0]

    def stream(self, leases: Iterable[Lease]) -> Generator[tuple[Lease, Micro], None, None]:
        """Yield each lease with its micro-batches, some read ahead of their use.

        Leases are drawn in the caller's thread, a few chunks before they are yielded. Close a
        stream that you do not read to its end, and return the leases that it had drawn.
        """
        with closing(ahead(self._read, self._chunks(leases), self._prefetch)) as chunks:
            for drawn, read in chunks:
                yield from zip(drawn, read, strict=True)

    def _chunks(self, leases: Iterable[Lease]) -> Iterator[list[Lease]]:
        """Group consecutive leases of one epoch until one more of the same size would not fit."""
        chunk: list[Lease] = []
        current, room = -1, 0
        for lease in leases:
            epoch, start, stop = lease
            if epoch != current and chunk:
                yield chunk
                chunk = []
            if not chunk:
                current, room = epoch, self._chunk
            chunk.append(lease)
            room -= stop - start
            if room < stop - start or len(chunk) == CHUNK_LEASES:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _read(self, leases: Sequence[Lease]) -> list[Micro]:
        epoch = leases[0].epoch
        ranges = _parts(leases, self.shard)
        positions = _positions(ranges)
        if not len(positions):
            return [[] for _ in leases]
        sizes = [stop - start for start, stop in ranges]
        parts = batches.split(self._gathered(epoch, positions), sizes)
        if self._augment is not None:
            where = np.split(positions, np.cumsum(sizes)[:-1])
            parts = [self._augmented(epoch, *pair) for pair in zip(parts, where, strict=True)]
        if self._micro == 1 and min(sizes):
            return [[part] for part in parts]
        return [_micro(part, size, self._micro) for part, size in zip(parts, sizes, strict=True)]

    def _gathered(self, epoch: int, positions: Rows) -> Batch:
        last = int(positions.max()) + 1
        assert last <= len(self.source), f"positions up to {last} of {len(self.source)} samples"
        rows = self._order_of(epoch).at(positions) if self._shuffle else positions
        chunk = self.source.gather(torch.from_numpy(rows))
        if not self._chunk and chunkable(self.source):
            mine = CHUNK_BYTES * len(positions) // max(1, batches.nbytes(chunk))
            self._chunk = mine * self.shard.count
        if self._device is None or self._device.type == "cpu":
            return chunk
        return batches.to_device(batches.pin(chunk), self._device, non_blocking=True)

    def _augmented(self, epoch: int, part: Batch, positions: Rows) -> Batch:
        if self._augment is None or not len(positions):
            return part
        return self._augment(part, PositionDraws(self._seed, epoch, positions, self._device))

    def _order_of(self, epoch: int) -> Order:
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = (epoch, Order(self._seed, epoch, len(self.source)))
        return kept[1]


def _parts(leases: Sequence[Lease], shard: Shard) -> list[tuple[int, int]]:
    """Return this worker's part of each lease, as [start, stop)."""
    index, count = shard.index, shard.count
    if count == 1:
        return [(start, stop) for _, start, stop in leases]
    if shard.shares:
        cuts = {size: edges(size, shard.shares) for size in {lease.size for lease in leases}}
        return [
            (lease.start + cuts[lease.size][index], lease.start + cuts[lease.size][index + 1])
            for lease in leases
        ]
    return [
        (start + (stop - start) * index // count, start + (stop - start) * (index + 1) // count)
        for _, start, stop in leases
    ]


def _positions(ranges: Iterable[tuple[int, int]]) -> Rows:
    """Return the positions in these ranges. Adjacent ranges, the usual case, are made in one go."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], stop
        else:
            runs.append((start, stop))
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def _micro(part: Batch, size: int, count: int) -> Micro:
    edges = [size * index // count for index in range(count + 1)]
    sizes = [stop - start for start, stop in pairwise(edges) if start < stop]
    return batches.split(part, sizes) if sizes else []


def ranges(samples: int, size: int) -> Iterator[Lease]:
    """Return leases for one pass over all samples, for evaluation; they are never committed."""
    return (Lease(0, start, min(start + size, samples)) for start in range(0, samples, size))


# Reading ahead

Item = TypeVar("Item")
Result = TypeVar("Result")
WORTH = 0.02
"""A thread is started when the smaller of the two times, reading and consuming, exceeds this share
of the larger one: the smaller one is the time that a thread can hide.

Below that there is little to gain, and a thread takes the interpreter lock from the consumer at
arbitrary times: with steps of 250 µs and reads of 1 % of that, reading in line was faster.
"""


def ahead(
    work: Callable[[Item], Result], items: Iterator[Item], depth: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield (item, work(item)) for each item in turn, with at most `depth` results made ahead.

    Items are taken and results yielded in the consumer's thread; the second thread only calls
    `work`, so `items` needs no lock. The thread starts once it is worth it (`WORTH`) and ends with
    the generator: by exhaustion, by an error on either side, or by `close`.
    """
    working = consuming = 0.0
    for turn, item in enumerate(items):
        began = perf_counter()
        result = work(item)
        ready = perf_counter()
        yield item, result
        if turn > 0:  # the first item also pays for everything that happens only once
            working += ready - began
            consuming += perf_counter() - ready
        if depth and min(working, consuming) > WORTH * max(working, consuming):
            break
    else:
        return
    helper = _Helper(work)
    try:
        yield from helper.results(items, depth)
    finally:
        helper.close()


class _Helper(Generic[Item, Result]):
    """A thread that processes items in order."""

    def __init__(self, work: Callable[[Item], Result]) -> None:
        self._work = work
        self._todo: SimpleQueue[tuple[Item] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Item, Result] | BaseException] = SimpleQueue()
        self._stopped = Event()
        # A daemon, because a generator that is never closed must not keep the process alive.
        self._thread = Thread(target=self._run, name="echelon-prefetch", daemon=True)
        self._thread.start()

    def results(self, items: Iterator[Item], depth: int) -> Iterator[tuple[Item, Result]]:
        waiting = self._give(islice(items, depth))
        while waiting:
            done = self._done.get()
            if isinstance(done, BaseException):
                raise done
            waiting += self._give(islice(items, 1)) - 1
            yield done

    def _give(self, items: Iterator[Item]) -> int:
        count = 0
        for item in items:
            self._todo.put((item,))
            count += 1
        return count

    def close(self) -> None:
        """End the thread; it finishes its current item and no other."""
        self._stopped.set()
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._todo.get()) is not None and not self._stopped.is_set():
            try:
                self._done.put((task[0], self._work(task[0])))
            except BaseException as error:
                self._done.put(error)
                return


# Random numbers that belong to samples

_TAG = 2
"""Separates draws from orders, which are hashed from (seed, epoch) too."""
_DROPPED = np.array(40, np.uint64)  # leaves the 24 bits that a float32 holds exactly


class PositionDraws:
    """Random numbers for the samples at these positions of an epoch's order."""

    def __init__(
        self,
        seed: int,
        epoch: int,
        positions: NDArray[np.int64],
        device: torch.device | None = None,
    ) -> None:
        self._seed = seed
        self._epoch = epoch
        self._positions = positions.view(np.uint64)
        self._device = device

    def uniform(self, draw: int) -> Tensor:
        """Return one float32 in [0, 1) per sample, a function of (seed, epoch, position, draw)."""
        drawn = words(self._positions, key(_TAG, self._seed, self._epoch, draw))
        drawn >>= _DROPPED
        numbers = torch.from_numpy(drawn.astype(np.float32)).mul_(2.0**-24)
        return numbers if self._device is None else numbers.to(self._device)
