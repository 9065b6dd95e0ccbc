"""Work done ahead of the one who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH = 0.02
"""A thread is started when the lesser of the work and the consumer's own time, which is what it
would hide, is more than this part of the greater one.

Below it there is little to win, and a thread takes the interpreter's lock from the consumer at
times of its own choosing: for steps of 250 µs, work of 1 % done in line was the faster.
"""


def ahead(
    work: Callable[[Item], Result], items: Iterator[Item], depth: int
) -> Generator[tuple[Item, Result], None, None]:
    """(item, work(item)) for each item in turn, at most `depth` of them made ready ahead.

    Items are taken and results handed over in the consumer's thread; another thread does nothing
    but `work`, so `items` needs no lock. It is started when it is worth it and ended with the
    generator: by exhaustion, by an error on either side, or by `close`.
    """
    working = consuming = 0.0
    for turn, item in enumerate(items):
        began = perf_counter()
        result = work(item)
        ready = perf_counter()
        yield item, result
        if turn > 0:  # the first is slowed down by everything that happens only once
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
    """A thread that works through what it is given, in order."""

    def __init__(self, work: Callable[[Item], Result]) -> None:
        self._work = work
        self._todo: SimpleQueue[tuple[Item] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Item, Result] | BaseException] = SimpleQueue()
        self._stopped = Event()
        # A daemon, for a consumer that is never closed must not keep the process from ending.
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
        """End the thread: it finishes the item it is at, and no other."""
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
