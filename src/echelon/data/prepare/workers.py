"""Worker processes: ordered map, task dispatch, progress.

Worker processes: tasks in, results out in the order of the tasks, whoever did them.

Each worker is a fresh interpreter (no fork beside the threads of Arrow or torch, and nothing of
the caller's script is run again) with one wire to it. It gets a task when it has none. Whatever it
makes that is large, it writes to files; what comes back is small.
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


# --- pool ---

_BOOT = (
    "import sys; sys.path[:] = {path}; "
    "from echelon.data.prepare.workers import live; live({descriptor}, {parent})"
)
_SEND_SECONDS = 60.0
_END_SECONDS = 10.0


class Task(NamedTuple):
    """Something to do: `told` says in a few words what, for messages."""

    told: str
    message: Mapping[str, Any]
    data: bytes = b""


class Pool(Protocol):
    """Who does the tasks."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The results, in the order of the tasks, which are taken from their iterator on need."""
        ...

    def close(self) -> None: ...


class Alone:
    """This process does everything itself."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        from echelon.data.prepare.passes import Work

        self._work = Work(setting)

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        for task in tasks:
            yield do_task(self._work, task.message, memoryview(task.data))

    def close(self) -> None:
        """There is nobody to send home."""


@dataclass(slots=True)
class _Hand:
    """One worker."""

    index: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    at: int | None = None
    """The number of the task it has."""
    told: str = ""


class Workers:
    """Several processes."""

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
        results: dict[int, Any] = {}
        given = taken = 0
        while True:
            for hand in self._hands:
                if hand.at is None and (task := _next(ahead, waiting)) is not None:
                    self._give(hand, given, task)
                    given += 1
            while taken in results:
                yield results.pop(taken)
                taken += 1
            if all(hand.at is None for hand in self._hands):
                if not ahead and (task := next(waiting, None)) is None:
                    return
                if not ahead and task is not None:
                    ahead.append(task)
                continue
            if len(ahead) < len(self._hands) and (task := next(waiting, None)) is not None:
                ahead.append(task)  # while workers work: what they want next is cut already
                self._collect(results, 0.0)
                continue
            self._collect(results, None)

    def close(self) -> None:
        """Send everybody home; whatever they are at can be done again."""
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
        """Take what workers have to say; waiting ends with Ctrl-C, an answer or an end of one."""
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
                process_group=0,  # a terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            mine.close()
            raise
    return _Hand(index, process, mine)


def _has_stderr() -> bool:
    """Not so in a notebook, where it is no file."""
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False


def _lost(hand: _Hand) -> WorkerError:
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


# --- worker ---
# A worker's process: it takes tasks from its wire until that is closed.
#
# Its first steps come before numpy is imported: that starts as many threads as there are cores.

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 0.1
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def live(descriptor: int, parent: int) -> None:
    """Be a worker of `parent`, whose end is this one's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        return
    for name in _THREADS:
        os.putenv(name, "1")  # one core each: there are as many workers as cores
    keep_freed_memory()  # a block needs what the one before it gave back
    with socket.socket(fileno=descriptor) as line:
        try:
            _serve(line)
        except Gone:
            sys.exit(0)


def _serve(line: socket.socket) -> None:
    setting, _ = receive(line)
    from echelon.data.prepare.passes import Work, one_thread

    one_thread()

    @cache
    def work() -> Work:  # made by the first task, so that a mistake in it is told
        return Work(setting)

    def do(task: Mapping[str, Any], data: bytearray) -> Any:
        return do_task(work(), task, memoryview(data))

    stage = None
    while True:
        if not select.select([line], [], [], _IDLE_SECONDS)[0]:
            give_back_freed_memory()  # the parent is at something that needs it
        task, data = receive(line)
        if task["stage"] != stage:
            stage = task["stage"]
            give_back_freed_memory()
        send(line, answered(do, task, data))


# --- wire ---
# Messages between the parent and a worker: JSON, and bytes beside it.

_HEADER = struct.Struct("<QQ")


class Gone(Exception):
    """The other end is not there any more."""


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


# --- answers ---
# What comes of a task, as plain values: a result, or why there is none.

Answer = dict[str, Any]


class WorkerError(EchelonError):
    """A worker ended, cannot work where it is, or met something that nobody foresaw."""


def answered(do: Callable[..., Any], *given: Any) -> Answer:
    """Where the work is done: whatever happens is told."""
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
    """Where the result is wanted; `told` says what was asked for."""
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


# --- watch ---
# How preparing data is told to those who watch.


class Watch(Protocol):
    """Sees the work go by; its faults would be the caller's."""

    def began(self, what: str, total: int | None, /) -> None:
        """A part of the work begins; `total` steps, where that is known."""
        ...

    def advanced(self, done: int, /) -> None:
        """So many steps of it are done."""
        ...

    def ended(self) -> None:
        """All is over, well or not."""
        ...


class Unwatched:
    """Nobody is told."""

    def began(self, what: str, total: int | None) -> None:
        """Nothing to tell."""

    def advanced(self, done: int) -> None:
        """Nothing to tell."""

    def ended(self) -> None:
        """Nothing to tell."""


# --- work ---


def do_task(work: Work, task: Mapping[str, Any], data: memoryview) -> Any:
    """Do it, unless it was done; what comes of it is small."""
    stage, number = task["stage"], task["number"]
    done = work.desk.result(stage, number)
    if done is None:
        done = work.desk.finish(stage, number, _do_task(work, task, data))
    return done


def _do_task(work: Work, task: Mapping[str, Any], data: memoryview) -> Any:
    from echelon.data.prepare import (
        passes,
    )  # only here: a worker sets itself up before numpy is there
    from echelon.data.prepare.passes import block_from

    number = task["number"]
    match task["do"]:
        case "clean":
            block = block_from(task["block"], data) if task["block"] else None
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
