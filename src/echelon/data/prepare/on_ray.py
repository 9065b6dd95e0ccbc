"""`OnRay`: the pool whose workers run on a Ray cluster, on machines that share a file system.

    address_of ─▶ connected: join a cluster, or start one ─▶ ask_nodes ─▶ Stream of tasks

The work folder, the inputs and Echelon itself must be the same on every node. Every node is asked
before anything is done (`check_here`), and every worker checks again when it starts. The stream of
tasks and the workers are in ray_stream.py; this module imports Ray only on use.
"""

from __future__ import annotations

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
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.core.errors import MissingExtra, UserError
from echelon.core.process import interrupts_wait
from echelon.data.formats.records import Source
from echelon.data.formats.remote import is_remote
from echelon.data.formats.streams import plain_name
from echelon.data.prepare.workdir import Desk
from echelon.data.prepare.workers import Answer, Task, WorkerError, result_of

if TYPE_CHECKING:
    from echelon.data.prepare.ray_stream import Check


LOCAL, AUTO = "local", "auto"


def address_of(on: str) -> str:
    """Parse `ray`, `ray:local` or `ray:HOST:PORT`; check that Ray is installed.

    Return LOCAL, AUTO or `HOST:PORT`.
    """
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


class OnRay:
    """The pool of `workers` on a Ray cluster; None: one per core of the cluster."""

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
            from echelon.data.prepare.ray_stream import Stream, cores

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


TOKEN = "token"
"""The fact in the work folder by which a node recognizes it."""


def _check(desk: Desk, token: str, read: Sequence[Source]) -> Check:
    """Mark the work folder; return the check that a node sees it, and the files workers read."""
    desk.remember(TOKEN, token)
    files = [
        (str(Path(one.file).absolute()), one.size)
        for one in read
        if not is_remote(one.file) and plain_name(Path(one.file)) == Path(one.file).name
    ]
    return partial(check_here, metadata.version("echelon"), desk, TOKEN, token, files)


def check_here(
    version: str, desk: Desk, name: str, token: str, files: Sequence[tuple[str, int]]
) -> None:
    """Raise WorkerError unless this node has the same Echelon, work folder and input files."""
    node = f"node {socket.gethostname()}"
    installed = metadata.version("echelon")
    if installed != version:
        raise WorkerError(f"{node} has Echelon {installed}, and not {version}")
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


def ask_nodes(check: Check) -> None:
    """Run the check on every node; raise WorkerError if one cannot take part."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from echelon.data.prepare.ray_stream import looks

    for name, coming in looks(check):
        try:
            result_of(ray.get(coming, timeout=_LOOK_SECONDS), f"node {name}")
        except GetTimeoutError:
            raise WorkerError(f"node {name} has not answered for {_LOOK_SECONDS:.0f} s") from None
        except RayError as error:
            raise WorkerError(f"node {name} cannot take part: {in_a_line(error)}") from None


_LOOK_SECONDS = 120.0
"""For a node to answer; it may have to start a process and import Echelon."""


def in_a_line(error: BaseException) -> str:
    """Shorten a Ray error, which holds a traceback or an explanation of many lines, to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if lines[0].startswith(("ray::", "\x1b", "Traceback")) else lines[0]


# Connecting to a cluster, or starting one


@contextmanager
def connected(address: str, workers: int | None) -> Iterator[None]:
    """Connect this process to a cluster; on exit, undo what was done here."""
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

    os.putenv("RAY_BACKEND_LOG_LEVEL", "fatal")  # else its internal messages reach the terminal
    try:
        # Ctrl-C waits, because nothing would end a cluster that has been started only partly.
        with interrupts_wait(), _handlers_kept(), _mute():
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
    """Check that the address accepts connections: Ray would try for a minute, then exit."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise WorkerError(f"there is no Ray cluster at {address}: {why}") from None


_REACH_SECONDS = 10.0
"""For a connection to the address of a cluster."""


@contextmanager
def _own(workers: int) -> Iterator[None]:
    """Run a cluster on this machine alone, on loopback, without usage statistics.

    On exit its processes have ended and its files are removed.
    """
    import ray
    from ray._common.usage import usage_lib
    from ray._private import ray_constants

    usage_lib.set_usage_stats_enabled_via_env_var(False)
    folder = tempfile.mkdtemp(prefix="echelon-ray-", dir="/tmp")  # paths of sockets must be short
    elsewhere = ray_constants.ENABLE_RAY_CLUSTER
    try:
        ray_constants.ENABLE_RAY_CLUSTER = False  # makes Ray listen on loopback only
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


_END_SECONDS = 10.0
"""For the processes of Ray to end by themselves, before they are killed."""
_STORE_MIN, _STORE_EACH = 256 << 20, 128 << 20
"""Bytes of Ray's object store: a base, and a share per worker."""


# Ray's side effects on this process, undone


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
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
    """Discard stderr: Ray announces there that it logs nothing. Errors are raised anyway."""
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
    """Silence Ray Data's messages on every stream; move Ray's on lost workers to stderr."""
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


# The processes of a cluster that was started here


class Processes:
    """The children of this process with `mark` in their arguments, and all their descendants."""

    def __init__(self, mark: str) -> None:
        self._handles: list[int] = []
        roots = [pid for pid in children(os.getpid()) if mark in arguments(pid)]
        for pid in below(roots):
            with suppress(ProcessLookupError):
                self._handles.append(os.pidfd_open(pid))

    def await_end(self, seconds: float) -> None:
        """Wait for their end; kill those that are still running after `seconds`."""
        deadline = time.monotonic() + seconds
        for handle in self._handles:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([handle], [], [], left)[0]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles = []


def below(roots: list[int]) -> list[int]:
    """Return these processes and all their descendants."""
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
