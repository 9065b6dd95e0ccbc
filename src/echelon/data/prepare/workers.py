"""Worker processes: an ordered map, `Pool.map(tasks) → results`, and what a worker does per task.

    parent (Workers)                     worker (live)
      start a fresh interpreter  ─────▶
      setting                    ─────▶  keep it; the first task builds Work(setting)
      task, bytes of its block   ─────▶  do_task: write large results to files of the work folder
                                 ◀─────  answer: the small result, or the error (answered)
      …
      close: kill

A worker has one task at a time and gets the next one when it has answered. `map` yields the results
in the order of the tasks. A message is a header (length of the JSON, length of the bytes: two
little-endian 64-bit numbers), the JSON and the bytes.

A worker is a fresh interpreter: a fork beside the threads of Arrow or torch may deadlock, and the
`spawn` of multiprocessing would run the caller's script again.

There are three pools: `Alone` (this process), `Workers` (processes on this machine), and `OnRay` in
on_ray.py. All run tasks by `do_task`, which does not repeat a task whose result is stored.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from echelon.core.errors import DataError, EchelonError, UserError
from echelon.core.process import give_back_freed_memory, interrupts_wait, keep_freed_memory

if TYPE_CHECKING:
    from echelon.data.prepare.passes import Work


class Task(NamedTuple):
    """A task for a worker. `told` describes it in a few words, for error messages."""

    told: str
    message: Mapping[str, Any]
    data: bytes = b""


class Pool(Protocol):
    """Runs tasks, in one or several processes."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Yield the results in the order of the tasks; take tasks only as they are needed."""
        ...

    def close(self) -> None: ...


class Alone:
    """The pool without worker processes: this process runs the tasks itself."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        from echelon.data.prepare.passes import Work

        self._work = Work(setting)

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        for task in tasks:
            yield do_task(self._work, task.message, memoryview(task.data))

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class Workers:
    """The pool of `count` worker processes on this machine."""

    def __init__(self, count: int, setting: Mapping[str, Any]) -> None:
        self._hands: list[_Hand] = []
        self._ready = selectors.DefaultSelector()
        try:
            with interrupts_wait():
                for index in range(count):
                    self._hands.append(_hired(index))
            for hand in self._hands:
                self._ready.register(hand.line, selectors.EVENT_READ, hand)
            for hand in self._hands:
                self._send(hand, setting)
        except OSError as error:
            self.close()
            raise WorkerError(f"{count} workers cannot be started: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        waiting = iter(tasks)
        ahead: deque[Task] = deque()
        results: dict[int, Any] = {}  # of later tasks than the next one to yield
        given = taken = 0
        while True:
            for hand in self._hands:
                if hand.at is None and (task := _next(ahead, waiting)) is not None:
                    self._give(hand, given, task)
                    given += 1
            while taken in results:
                yield results.pop(taken)
                taken += 1
            if all(hand.at is None for hand in self._hands):  # there was no task to give
                if not ahead and (task := next(waiting, None)) is None:
                    return
                if not ahead and task is not None:
                    ahead.append(task)
                continue
            if len(ahead) < len(self._hands) and (task := next(waiting, None)) is not None:
                ahead.append(task)  # cut the next blocks while the workers are busy
                self._collect(results, 0.0)
                continue
            self._collect(results, None)

    def close(self) -> None:
        """Kill the workers. A task that is cut short leaves no result and is done again."""
        for hand in self._hands:
            with suppress(ProcessLookupError):
                hand.process.kill()
        for hand in self._hands:
            with suppress(subprocess.TimeoutExpired):
                hand.process.wait(_END_SECONDS)
            hand.line.close()
        self._hands = []
        self._ready.close()

    def _collect(self, results: dict[int, Any], seconds: float | None) -> None:
        """Collect the answers there are; wait up to `seconds` for one (None: without limit).

        A worker that ends, and Ctrl-C, end the wait too.
        """
        for key, _ in self._ready.select(seconds):
            hand: _Hand = key.data
            answer = self._answer(hand)
            assert hand.at is not None, "a worker answers what it was asked"
            results[hand.at] = answer
            hand.at = None

    def _give(self, hand: _Hand, number: int, task: Task) -> None:
        hand.at, hand.told = number, task.told
        self._send(hand, task.message, task.data)

    def _send(self, hand: _Hand, message: Mapping[str, Any], data: bytes = b"") -> None:
        try:
            send(hand.line, message, data)
        except TimeoutError:
            raise WorkerError(f"worker {hand.index} does not take its work") from None
        except Gone:
            raise _lost(hand) from None

    def _answer(self, hand: _Hand) -> Any:
        try:
            answer, _ = receive(hand.line)
        except TimeoutError:
            raise WorkerError(f"worker {hand.index} stopped in mid-sentence") from None
        except Gone:
            raise _lost(hand) from None
        return result_of(answer, hand.told)


@dataclass(slots=True)
class _Hand:
    """The parent's view of one worker process."""

    index: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    at: int | None = None
    """The number of its task; None while it is idle."""
    told: str = ""


def _next(ahead: deque[Task], waiting: Iterator[Task]) -> Task | None:
    return ahead.popleft() if ahead else next(waiting, None)


def _hired(index: int) -> _Hand:
    mine, other = socket.socketpair()
    mine.settimeout(_SEND_SECONDS)
    other.settimeout(None)
    with other:
        code = _BOOT.format(
            path=json.dumps(sys.path), descriptor=other.fileno(), parent=os.getpid()
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,  # so that a terminal's Ctrl-C reaches the parent alone
            )
        except BaseException:
            mine.close()
            raise
    return _Hand(index, process, mine)


_BOOT = (
    "import sys; sys.path[:] = {path}; "
    "from echelon.data.prepare.workers import live; live({descriptor}, {parent})"
)
_SEND_SECONDS = 60.0
"""An idle worker reads its socket: a message that takes longer than this is stuck."""
_END_SECONDS = 10.0
"""How long to wait for the end of a process that was killed or has closed its socket."""


def _has_stderr() -> bool:
    """Return whether stderr is a file that a process can inherit; in a notebook it is not."""
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False


def _lost(hand: _Hand) -> WorkerError:
    """Return the error for a worker that closed its socket: how it ended, and at which task."""
    try:
        code = hand.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return WorkerError(f"worker {hand.index} does not answer any more ({hand.told})")
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        how += " (is there enough memory?)" if code == -signal.SIGKILL else ""
    at = f" at: {hand.told}" if hand.told else ""
    return WorkerError(f"worker {hand.index} {how}{at}; start again to go on from there")


# The worker process


def live(descriptor: int, parent: int) -> None:
    """Serve tasks until the socket is closed or the process `parent` ends.

    Thread counts are set here, before `_serve` imports numpy, which starts a thread per core.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl took effect
        return
    for name in _THREADS:
        os.putenv(name, "1")  # there are as many workers as cores
    keep_freed_memory()  # the next block needs the memory that this one frees
    with socket.socket(fileno=descriptor) as line:
        try:
            _serve(line)
        except Gone:
            sys.exit(0)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 0.1
"""A worker without a task for so long returns its freed memory to the kernel."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def _serve(line: socket.socket) -> None:
    setting, _ = receive(line)
    from echelon.data.prepare.passes import Work, one_thread

    one_thread()

    @cache
    def work() -> Work:  # built within the first task, so that an error in it becomes its answer
        return Work(setting)

    def do(task: Mapping[str, Any], data: bytearray) -> Any:
        return do_task(work(), task, memoryview(data))

    stage = None
    while True:
        if not select.select([line], [], [], _IDLE_SECONDS)[0]:
            give_back_freed_memory()  # the parent is busy, and may need it
        task, data = receive(line)
        if task["stage"] != stage:
            stage = task["stage"]
            give_back_freed_memory()
        send(line, answered(do, task, data))


def do_task(work: Work, task: Mapping[str, Any], data: memoryview) -> Any:
    """Run a task unless its result is stored already; store and return its (small) result."""
    stage, number = task["stage"], task["number"]
    done = work.desk.result(stage, number)
    if done is None:
        done = work.desk.finish(stage, number, _dispatch(work, task, data))
    return done


def _dispatch(work: Work, task: Mapping[str, Any], data: memoryview) -> Any:
    from echelon.data.prepare import passes  # not at the top: `live` runs before numpy is imported

    number = task["number"]
    match task["do"]:
        case "clean":
            block = passes.block_from(task["block"], data) if task["block"] else None
            segment = work.segments[task["segment"]]
            return passes.clean_block(work, segment, number, block, task["split"])
        case "look-clean":
            segment = work.segments[task["segment"]]
            return passes.look_clean(work, segment, number, task["at"])
        case "look":
            return passes.look_block(work, task["stage"], number, task["active"])
        case "encode":
            from echelon.data.prepare.write import encode_block

            return encode_block(work, number)
        case "shard":
            from echelon.data.prepare.write import write_shard

            return write_shard(work, task["split"], task["shard"], task["pieces"])
    raise AssertionError(task["do"])


# Messages between parent and worker


def send(wire: socket.socket, message: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    text = json.dumps(message).encode()
    try:
        wire.sendall(_HEADER.pack(len(text), len(data)))
        wire.sendall(text)
        wire.sendall(data)
    except TimeoutError:
        raise
    except OSError as error:
        raise Gone(error.strerror) from None


def receive(wire: socket.socket) -> tuple[dict[str, Any], bytearray]:
    text, data = _HEADER.unpack(_exactly(wire, _HEADER.size))
    message: dict[str, Any] = json.loads(_exactly(wire, text))
    return message, _exactly(wire, data)


def _exactly(wire: socket.socket, size: int) -> bytearray:
    whole = bytearray(size)
    rest = memoryview(whole)
    while rest:
        try:
            got = wire.recv_into(rest)
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone(error.strerror) from None
        if not got:
            raise Gone("closed")
        rest = rest[got:]
    return whole


_HEADER = struct.Struct("<QQ")


class Gone(Exception):
    """The other end of the socket is closed."""


# Answers: the result of a task, or its error, as plain values


Answer = dict[str, Any]


def answered(do: Callable[..., Any], *given: Any) -> Answer:
    """Call `do` in the worker; return its result or its error as plain values."""
    try:
        return {"result": do(*given)}
    except UserError as error:
        return {"mistake": str(error)}
    except WorkerError as error:
        return {"place": str(error)}
    except OSError as error:
        return {"system": [error.errno, error.strerror, str(error.filename or "")]}
    except Exception as error:
        return {"fault": repr(error), "traceback": traceback.format_exc()}


def result_of(answer: Mapping[str, Any], told: str) -> Any:
    """Return the result in the parent, or raise the worker's error; `told` describes the task."""
    if "mistake" in answer:
        raise DataError(answer["mistake"])
    if "place" in answer:
        raise WorkerError(answer["place"])
    if "system" in answer:  # such as a full disk
        raise OSError(*answer["system"])
    if "fault" in answer:
        error = WorkerError(f"{told}: {answer['fault']}")
        error.add_note(answer["traceback"].rstrip())
        raise error
    return answer["result"]


class WorkerError(EchelonError):
    """A worker ended, cannot work on its machine, or met an unexpected error."""


# Progress


class Watch(Protocol):
    """Observes the progress of a preparation. Its exceptions are not caught."""

    def began(self, what: str, total: int | None, /) -> None:
        """Called when a pass begins, with the number of its tasks if that is known."""
        ...

    def advanced(self, done: int, /) -> None:
        """Called with the number of completed tasks."""
        ...

    def ended(self) -> None:
        """Called at the end of the preparation, whether it succeeded or failed."""
        ...


class Unwatched:
    """The `Watch` that ignores everything."""

    def began(self, what: str, total: int | None) -> None:
        pass

    def advanced(self, done: int) -> None:
        pass

    def ended(self) -> None:
        pass
