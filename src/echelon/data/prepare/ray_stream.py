"""Tasks in, answers out in order: one stream of Ray Data over a whole preparation.

    put ─▶ Feed ─▶ read: one task ─▶ Ray Data ─▶ a Hand per core, on any node ─▶ take

Ray Data wants to know what there is to read before it begins, but blocks are cut only as they are
needed. So the stream's only source asks the `Feed`, which waits for the next task. The feed and the
source are on the node of this process. If another node is lost, Ray starts its workers elsewhere
and gives them the same tasks again; a task that was done before returns its stored result.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from echelon.core.process import keep_freed_memory
from echelon.data.prepare.workdir import Desk
from echelon.data.prepare.workers import Answer, WorkerError, answered, do_task

if TYPE_CHECKING:
    from echelon.data.prepare.passes import Work


class Stream:
    """The stream of one preparation, on `hands` workers."""

    def __init__(
        self, hands: int, setting: Mapping[str, Any], folder: str, run: str, check: Check
    ) -> None:
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._feed = ray.remote(Feed).options(num_cpus=0, label_selector=here).remote()
        with DataContext.current(_context()):
            tasks = ray.data.read_datasource(
                StreamSource(self._feed), override_num_blocks=1, num_cpus=0, label_selector=here
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
        """How many tasks may be under way: those of the workers, and the next ones."""
        self.put_so_far = self.taken = 0

    def put(self, told: str, message: Mapping[str, Any], data: bytes) -> None:
        """Add a task (the fields of workers.Task)."""
        text = json.dumps([told, message]).encode()
        self._feed.put.remote(self.put_so_far, self.taken, text, data)
        self.put_so_far += 1

    def take(self) -> Answer:
        """Wait for the next answer, in the order of the tasks."""
        if self._answers is None:  # the stream starts with the first task
            self._answers = iter(self._answered.iter_internal_ref_bundles())
        bundle = next(self._answers)
        (block,) = ray.get(bundle.block_refs)
        self.taken += 1
        answer: Answer = json.loads(block["answer"][0].as_py())
        return answer

    def close(self) -> None:
        """End the stream, its workers and the feed; unfinished tasks can be done again."""
        self._answers = None  # dropping the iterator ends the stream
        self._answered = None
        with suppress(RayError):  # a lost cluster has no workers either
            # Ray Data only drops its references; busy or just started workers would stay.
            for hand in ray.get(self._feed.entered.remote(), timeout=_ENTER_SECONDS):
                ray.kill(hand)
        ray.kill(self._feed)


_ENTER_SECONDS = 60.0
"""For the feed to answer a worker that registers, or the end of the stream."""
_AT_ONCE = 2
"""Tasks per worker: the current one and the next."""


def _context() -> DataContext:
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # pass on every task and every answer at once, by itself
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return context


def cores() -> int:
    """Return the number of cores of the cluster."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def looks(check: Check) -> list[tuple[str, Any]]:
    """Start the check on every node; return each node's name and the reference of its answer."""
    look = ray.remote(num_cpus=0)(answered)
    found = []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            there = {"ray.io/node-id": node["NodeID"]}
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            found.append((name, look.options(label_selector=there).remote(check)))
    return found


class Feed:
    """An actor that holds the tasks until their answers were taken, and knows all workers."""

    def __init__(self) -> None:
        self._hands: list[Any] = []
        self._tasks: dict[int, tuple[bytes, bytes]] = {}
        self._first = 0
        self._news = asyncio.Condition()

    async def put(self, number: int, first: int, message: bytes, data: bytes) -> None:
        """Add a task; drop those before `first`, whose answers were taken."""
        async with self._news:
            for done in range(self._first, first):
                self._tasks.pop(done, None)
            self._first = first
            self._tasks[number] = (message, data)
            self._news.notify_all()

    async def get(self, number: int) -> tuple[bytes, bytes]:
        """Wait for a task and return it.

        A dropped task is empty: when Ray reads the stream again after a loss, only positions count.
        """
        async with self._news:
            await self._news.wait_for(lambda: number in self._tasks or number < self._first)
            return self._tasks.get(number, (b"", b""))

    async def enter(self, hand: Any) -> None:
        self._hands.append(hand)

    async def entered(self) -> list[Any]:
        return self._hands


class StreamSource(Datasource):  # type: ignore[misc]
    """A Ray Data source over the feed: one table of one row per task, each its own block."""

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
    """Register this worker with the feed; raises if the feed is closed, which ends the worker."""
    me = ray.get_runtime_context().current_actor
    ray.get(feed.enter.remote(me), timeout=_ENTER_SECONDS)


# A worker


Check = Callable[[], None]
"""Raises on a node that cannot take part."""


class Hand:
    """A worker on the cluster: an actor with one core, which maps a table of a task to its answer.

    Errors are part of the answer; it raises nothing.
    """

    def __init__(
        self,
        enter: Callable[[], None],
        setting: Mapping[str, Any],
        folder: str,
        run: str,
        check: Check,
    ) -> None:
        """`enter` registers the worker and raises if the preparation is over.

        `folder` is the current folder of the process that began it, `run` identifies that process.
        """
        enter()
        self._setting, self._folder, self._run, self._check = setting, folder, run, check
        self._known: Work | None = None

    def __call__(self, tasks: pa.Table) -> pa.Table:
        (text,), (data,) = tasks["task"].to_pylist(), tasks["data"].to_pylist()
        answer = answered(self._do, *json.loads(text), data)
        return pa.table({"answer": [json.dumps(answer)]})

    def _do(self, told: str, task: Mapping[str, Any], data: bytes) -> Any:
        self._known = self._known or self._begin()
        look_again(self._known.desk)
        begun = self._known.desk.path(task["stage"], task["number"], f"begun-{self._run}")
        try:
            with _counted(begun, told):
                return do_task(self._known, task, memoryview(data))
        except OSError as error:
            why = f"{error.strerror} (on node {socket.gethostname()})"
            raise OSError(error.errno, why, error.filename) from None

    def _begin(self) -> Work:
        """Set this process up as workers.live does, in the folder of the preparation."""
        from threadpoolctl import threadpool_limits

        from echelon.data.prepare.passes import Work, one_thread

        self._check()
        if Path(self._folder).is_dir():  # on a node without it, only absolute paths are found
            os.chdir(self._folder)
        keep_freed_memory()
        one_thread()
        work = Work(self._setting)
        threadpool_limits(1)
        return work


@contextmanager
def _counted(begun: Path, told: str) -> Iterator[None]:
    """Count in a file, one byte each, how often a task was begun without being ended."""
    with begun.open("ab") as file:
        file.write(b".")
        tries = file.tell()
    if tries > TRIES:
        begun.unlink()
        raise WorkerError(f"workers have died {TRIES} times at: {told} (is there enough memory?)")
    yield
    begun.unlink()


TRIES = 4
"""A task whose worker died is repeated so often, but must not kill all workers in turn."""


def look_again(desk: Desk) -> None:
    """Open all folders of the work folder, so that a network file system looks at them again.

    Its cache may still say that files do not exist which other nodes have written since.
    """
    with os.scandir(desk.root) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    for path in (str(desk.root), *folders):
        os.close(os.open(path, os.O_RDONLY))
