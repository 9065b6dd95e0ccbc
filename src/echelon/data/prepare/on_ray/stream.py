"""Tasks in, answers out in their order: one stream of Ray Data over a whole preparation.

    put ─▶ Feed ─▶ read: one task ─▶ Ray Data ─▶ a Hand per core, on any node ─▶ take

Ray Data wants to know what there is to read before it begins; what we read is cut as it is wanted.
So its only source asks the feed, which waits for the next task. The feed and the source are on the
node of this process. What is lost with another node Ray makes again: hands are started elsewhere,
tasks are given again, and a task that was done before says what it said then.

Imported where Ray is wanted: this needs it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from echelon.data.prepare.answers import Answer, answered
from echelon.data.prepare.on_ray.hand import Hand
from echelon.data.prepare.on_ray.node import Check

_ENTER_SECONDS = 60.0
_AT_ONCE = 2
"""Tasks that a hand has: one that it is at, and the next."""


class Feed:
    """Tasks by number, kept until their answers were taken; and the hands that do them."""

    def __init__(self) -> None:
        self._hands: list[Any] = []
        self._tasks: dict[int, tuple[bytes, bytes]] = {}
        self._first = 0
        self._news = asyncio.Condition()

    async def put(self, number: int, first: int, message: bytes, data: bytes) -> None:
        """Answers before `first` were taken."""
        async with self._news:
            for done in range(self._first, first):
                self._tasks.pop(done, None)
            self._first = first
            self._tasks[number] = (message, data)
            self._news.notify_all()

    async def get(self, number: int) -> tuple[bytes, bytes]:
        """Wait for it. One that nobody needs any more is empty: only its place in the row counts,
        when Ray reads it all again."""
        async with self._news:
            await self._news.wait_for(lambda: number in self._tasks or number < self._first)
            return self._tasks.get(number, (b"", b""))

    async def enter(self, hand: Any) -> None:
        self._hands.append(hand)

    async def entered(self) -> list[Any]:
        return self._hands


class Source(Datasource):  # type: ignore[misc]
    """What the feed has, as a table of one row per task, each a block of its own."""

    def __init__(self, feed: Any) -> None:
        super().__init__()
        self._feed = feed

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *given: Any, **more: Any) -> list[ReadTask]:
        about = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(_read, self._feed), about)]


def _read(feed: Any) -> Iterator[pa.Table]:
    number = 0
    while True:  # until the stream is closed
        message, data = ray.get(feed.get.remote(number))
        yield pa.table({"task": [message], "data": pa.array([data], pa.large_binary())})
        number += 1


def _enter(feed: Any) -> None:
    """A hand that comes when the feed has been closed ends at once."""
    me = ray.get_runtime_context().current_actor
    ray.get(feed.enter.remote(me), timeout=_ENTER_SECONDS)


class Stream:
    """The tasks of one preparation, on `hands` workers."""

    def __init__(
        self, hands: int, setting: Mapping[str, Any], folder: str, run: str, check: Check
    ) -> None:
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._feed = ray.remote(Feed).options(num_cpus=0, label_selector=here).remote()
        with DataContext.current(_context()):
            tasks = ray.data.read_datasource(
                Source(self._feed), override_num_blocks=1, num_cpus=0, label_selector=here
            )
            self._answered = tasks.map_batches(
                Hand,
                fn_constructor_args=(partial(_enter, self._feed), setting, folder, run, check),
                batch_size=None,
                batch_format="pyarrow",
                compute=ActorPoolStrategy(size=hands, max_tasks_in_flight_per_actor=_AT_ONCE),
                num_cpus=1,
            )
        self._answers: Iterator[Any] | None = None
        self.room = _AT_ONCE * hands + 2
        """How many tasks may be on their way: those of hands, and what is wanted next."""
        self.put_so_far = self.taken = 0

    def put(self, told: str, message: Mapping[str, Any], data: bytes) -> None:
        text = json.dumps([told, message]).encode()
        self._feed.put.remote(self.put_so_far, self.taken, text, data)
        self.put_so_far += 1

    def take(self) -> Answer:
        """The next answer, in the order of the tasks; wait for it."""
        if self._answers is None:  # it begins with the first task
            self._answers = iter(self._answered.iter_internal_ref_bundles())
        bundle = next(self._answers)
        (block,) = ray.get(bundle.block_refs)
        self.taken += 1
        answer: Answer = json.loads(block["answer"][0].as_py())
        return answer

    def close(self) -> None:
        """End hands and all; whatever they are at can be done again."""
        self._answers = None  # its end is that of the stream
        self._answered = None
        with suppress(RayError):  # a cluster that is lost has no hands either
            # Ray Data only lets go of them, and some would stay: at their work, or just begun.
            for hand in ray.get(self._feed.entered.remote(), timeout=_ENTER_SECONDS):
                ray.kill(hand)
        ray.kill(self._feed)


def _context() -> DataContext:
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # every task and every answer for itself, at once
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return context


def looks(check: Check) -> list[tuple[str, Any]]:
    """Have every node look; the name of each, and its answer that is on its way."""
    look = ray.remote(num_cpus=0)(answered)
    found = []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            there = {"ray.io/node-id": node["NodeID"]}
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            found.append((name, look.options(label_selector=there).remote(check)))
    return found


def cores() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
