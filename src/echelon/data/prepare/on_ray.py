"""The same map on Ray Data."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

import echelon
from echelon.core.errors import MissingExtra, UserError
from echelon.core.process import interrupts_wait, keep_freed_memory
from echelon.data.formats.records import Source
from echelon.data.formats.remote import is_remote
from echelon.data.formats.streams import plain_name
from echelon.data.prepare.workdir import Desk
from echelon.data.prepare.workers import Answer, Task, WorkerError, answered, do_task, result_of

if TYPE_CHECKING:
    from echelon.data.prepare.passes import Work


# --- cluster ---
# A Ray cluster: the one this machine belongs to, one at an address, or one that is started here.
#
# Imports Ray only on use.

LOCAL, AUTO = "local", "auto"
_REACH_SECONDS = 10.0
_END_SECONDS = 10.0
_STORE_MIN, _STORE_EACH = 256 << 20, 128 << 20


def address_of(on: str) -> str:
    """`ray`, `ray:local` or `ray:HOST:PORT` → where it is; checks that Ray is there to be used."""
    kind, _, address = on.partition(":")
    if address.startswith("//"):
        raise UserError(
            f"on is {on!r}: a Ray client cannot do this; begin on a machine of the cluster, "
            f"with ray or ray:HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    known = address in ("", LOCAL) or (host and port.isdecimal())
    if kind != "ray" or not known:
        raise UserError(f"on is {on!r}: it must be ray, ray:local or ray:HOST:PORT")
    if find_spec("ray") is None or find_spec("pandas") is None:
        raise MissingExtra(f"on={on}", "ray")
    return address or AUTO


@contextmanager
def connected(address: str, workers: int | None) -> Iterator[None]:
    """Ray is there; what was begun here is ended here."""
    import ray

    with ExitStack() as stack:
        if ray.is_initialized():
            if address != AUTO:
                raise WorkerError(
                    f"this process is on a Ray cluster already, not on {address}: say on='ray'"
                )
        elif address == LOCAL:
            stack.enter_context(_own(workers or 1))
        else:
            _reach(address)
            _begin(address)
            stack.callback(ray.shutdown)
        stack.enter_context(_silent())
        yield


def _begin(address: str, **settings: Any) -> None:
    import ray

    os.putenv("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it tells the terminal of its insides
    try:
        with interrupts_wait(), _handlers_kept(), _mute():  # half a cluster would be nobody's
            ray.init(
                address=address, logging_level=logging.CRITICAL, log_to_driver=False, **settings
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        ray.shutdown()
        if address == AUTO and isinstance(error, ConnectionError):
            raise WorkerError(
                "no Ray cluster runs on this machine: begin one with `ray start`, name one with "
                "ray:HOST:PORT, or say ray:local for this machine alone"
            ) from None
        raise WorkerError(f"Ray ({address}): {in_a_line(error)}") from None


def _reach(address: str) -> None:
    """Ray itself would try for a minute, and then end this process."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise WorkerError(f"there is no Ray cluster at {address}: {why}") from None


@contextmanager
def _own(workers: int) -> Iterator[None]:
    """A cluster on this machine alone: nobody hears of it, and nothing is left of it."""
    import ray
    from ray._common.usage import usage_lib
    from ray._private import ray_constants

    usage_lib.set_usage_stats_enabled_via_env_var(False)
    folder = tempfile.mkdtemp(prefix="echelon-ray-", dir="/tmp")  # sockets want a short path
    elsewhere = ray_constants.ENABLE_RAY_CLUSTER
    try:
        ray_constants.ENABLE_RAY_CLUSTER = False  # listen on loopback alone
        _begin(
            LOCAL,
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=_STORE_MIN + workers * _STORE_EACH,
            _temp_dir=folder,
        )
        yield
    finally:
        with interrupts_wait():
            processes = Processes(folder)
            ray.shutdown()
            processes.await_end(_END_SECONDS)
        ray_constants.ENABLE_RAY_CLUSTER = elsewhere
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _mute() -> Iterator[None]:
    """Ray tells the terminal that it was told to be silent; what is wrong is raised."""
    with Path(os.devnull).open("wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def _silent() -> Iterator[None]:
    """Ray Data tells of every stream it runs, and Ray of lost workers, on stdout."""
    import ray.data  # sets its logger up

    handlers = logging.getLogger("ray.data").handlers
    levels = [handler.level for handler in handlers]
    said = ray._private.worker.print_to_stdstream
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    ray._private.worker.print_to_stdstream = partial(_to_stderr, said)
    try:
        yield
    finally:
        ray._private.worker.print_to_stdstream = said
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _to_stderr(
    say: Callable[..., None], message: Mapping[str, Any], *given: Any, **more: Any
) -> None:
    say({**message, "is_err": True}, *given, **more)


def in_a_line(error: BaseException) -> str:
    """Ray's errors hold a traceback, or an explanation, of many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if lines[0].startswith(("ray::", "\x1b", "Traceback")) else lines[0]


# --- hand ---
# A worker on a Ray cluster: an actor that has one core of some node.

TRIES = 4
"""A task is given again when its worker dies, but not to kill one after the other."""


class Hand:
    """Makes a table of one answer of a table of one task; raises nothing."""

    def __init__(
        self,
        enter: Callable[[], None],
        setting: Mapping[str, Any],
        folder: str,
        run: str,
        check: Check,
    ) -> None:
        """`enter` raises if it is all over; `folder`: where whoever began it is; `run` tells one
        start of it from another."""
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
        """As worker processes do: one thread, and the folder of whoever began it."""
        from threadpoolctl import threadpool_limits

        from echelon.data.prepare.passes import Work, one_thread

        self._check()
        if Path(self._folder).is_dir():  # without it only whole paths are found
            os.chdir(self._folder)
        keep_freed_memory()
        one_thread()
        work = Work(self._setting)
        threadpool_limits(1)
        return work


@contextmanager
def _counted(begun: Path, told: str) -> Iterator[None]:
    """One byte for each time that it was begun and not ended."""
    with begun.open("ab") as file:
        file.write(b".")
        tries = file.tell()
    if tries > TRIES:
        begun.unlink()
        raise WorkerError(f"workers have died {TRIES} times at: {told} (is there enough memory?)")
    yield
    begun.unlink()


# --- node ---
# A machine of a cluster: whether what is worked on is there, and is the same.

Check = Callable[[], None]
"""Raises where a node cannot take part."""


def check_here(
    version: str, desk: Desk, name: str, token: str, files: Sequence[tuple[str, int]]
) -> None:
    """The same Echelon, the mark on the desk, the files in their sizes."""
    node = f"node {socket.gethostname()}"
    if echelon.__version__ != version:
        raise WorkerError(f"{node} has Echelon {echelon.__version__}, and not {version}")
    if desk.recall(name) != token:
        raise WorkerError(
            f"{node} does not see {desk.root}: "
            f"prepare into a folder that all machines of the cluster share"
        )
    for file, size in files:
        if not _is_there(Path(file), size):
            raise WorkerError(
                f"{node} does not see {file}, or sees another one: "
                f"read from folders that all machines of the cluster share"
            )


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.is_dir() or path.stat().st_size == size
    except OSError:
        return False


def look_again(desk: Desk) -> None:
    """A network file system may remember of files that others have made since that there are none;
    that their folder is opened makes it ask."""
    with os.scandir(desk.root) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    for path in (str(desk.root), *folders):
        os.close(os.open(path, os.O_RDONLY))


# --- pool ---
# The third kind of pool: workers on the machines of a Ray cluster, which share a file system.
#
# The desk, the inputs and Echelon itself must be the same on every node: each is asked before
# anything is done, and every worker looks again where it begins.

TOKEN = "token"
_LOOK_SECONDS = 120.0


class OnRay:
    """`workers` of a cluster, or as many as it has cores."""

    def __init__(
        self,
        address: str,
        workers: int | None,
        setting: Mapping[str, Any],
        read: Sequence[Source],
    ) -> None:
        token = secrets.token_hex(8)
        check = _check(Desk(Path(setting["desk"]).absolute()), token, read)
        with ExitStack() as stack:
            stack.enter_context(connected(address, workers))

            ask_nodes(check)
            self._stream = Stream(workers or cores(), setting, str(Path.cwd()), token, check)
            stack.enter_context(closing(self._stream))
            self._open = stack.pop_all()

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        waiting = iter(tasks)
        told: deque[str] = deque()
        while True:
            for task in islice(waiting, self._stream.room - len(told)):
                self._stream.put(*task)
                told.append(task.told)
            if not told:
                return
            answer = self._answer(told)
            yield result_of(answer, told.popleft())

    def _answer(self, told: Iterable[str]) -> Answer:
        try:
            return self._stream.take()
        except Exception as error:
            at = ", ".join(dict.fromkeys(told))
            raise WorkerError(
                f"Ray gave up: {in_a_line(error)} (under way: {at}); start again to go on"
            ) from error

    def close(self) -> None:
        self._open.close()


def _check(desk: Desk, token: str, read: Sequence[Source]) -> Check:
    """What a node has to see: a mark on the desk, and files that workers read by themselves."""
    desk.remember(TOKEN, token)
    files = [
        (str(Path(one.file).absolute()), one.size)
        for one in read
        if not is_remote(one.file) and plain_name(Path(one.file)) == Path(one.file).name
    ]
    return partial(check_here, echelon.__version__, desk, TOKEN, token, files)


def ask_nodes(check: Check) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    for name, coming in looks(check):
        try:
            result_of(ray.get(coming, timeout=_LOOK_SECONDS), f"node {name}")
        except GetTimeoutError:
            raise WorkerError(f"node {name} has not answered for {_LOOK_SECONDS:.0f} s") from None
        except RayError as error:
            raise WorkerError(f"node {name} cannot take part: {in_a_line(error)}") from None


# --- processes ---
# The processes of a Ray that was started here: none of them outlives the work.


class Processes:
    """Those that were started with `mark` in their arguments, and all that these started."""

    def __init__(self, mark: str) -> None:
        self._handles: list[int] = []
        roots = [pid for pid in children(os.getpid()) if mark in arguments(pid)]
        for pid in below(roots):
            with suppress(ProcessLookupError):
                self._handles.append(os.pidfd_open(pid))

    def await_end(self, seconds: float) -> None:
        """Whoever is still there then is killed."""
        deadline = time.monotonic() + seconds
        for handle in self._handles:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([handle], [], [], left)[0]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles = []


def below(roots: list[int]) -> list[int]:
    found: list[int] = []
    while roots:
        found += roots
        roots = [child for pid in roots for child in children(pid)]
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def arguments(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


# --- stream ---
# Tasks in, answers out in their order: one stream of Ray Data over a whole preparation.
#
#     put ─▶ Feed ─▶ read: one task ─▶ Ray Data ─▶ a Hand per core, on any node ─▶ take
#
# Ray Data wants to know what there is to read before it begins; what we read is cut as it is
# wanted. So its only source asks the feed, which waits for the next task. The feed and the source
# are on the node of this process. What is lost with another node Ray makes again: hands are
# started elsewhere, tasks are given again, and a task that was done before says what it said then.
#
# Imported where Ray is wanted: this needs it.

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


class StreamSource(Datasource):  # type: ignore[misc]
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
