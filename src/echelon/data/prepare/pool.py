"""Worker processes: tasks in, results out in the order of the tasks, whoever did them.

Each worker is a fresh interpreter (no fork beside the threads of Arrow or torch, and nothing of
the caller's script is run again) with one wire to it. It gets a task when it has none. Whatever it
makes that is large, it writes to files; what comes back is small.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from echelon.core.process import interrupts_wait
from echelon.data.prepare import wire
from echelon.data.prepare.answers import WorkerError, result_of

_BOOT = (
    "import sys; sys.path[:] = {path}; "
    "from echelon.data.prepare.worker import live; live({descriptor}, {parent})"
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
        from echelon.data.prepare.work import Work

        self._work = Work(setting)

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        for task in tasks:
            yield self._work.do(task.message, memoryview(task.data))

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
            wire.send(hand.line, message, data)
        except TimeoutError:
            raise WorkerError(f"worker {hand.index} does not take its work") from None
        except wire.Gone:
            raise _lost(hand) from None

    def _answer(self, hand: _Hand) -> Any:
        try:
            answer, _ = wire.receive(hand.line)
        except TimeoutError:
            raise WorkerError(f"worker {hand.index} stopped in mid-sentence") from None
        except wire.Gone:
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
