"""Results made ahead come in order, are limited in number, and leave no thread behind."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from echelon.data import loader
from echelon.data.loader import ahead

HELPER = "echelon-prefetch"


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any work worth a thread, which then starts with the second item."""
    monkeypatch.setattr(loader, "WORTH", -1.0)


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == HELPER]


def double(number: int) -> int:
    return 2 * number


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("depth", [0, 1, 2, 7, 1000])
def test_results_come_in_order(depth: int) -> None:
    assert list(ahead(double, iter(range(100)), depth)) == [(n, 2 * n) for n in range(100)]
    assert not helpers()


def test_nothing_to_do() -> None:
    assert list(ahead(double, iter([]), 2)) == []


@pytest.mark.usefixtures("threaded")
def test_no_more_than_depth_are_made_ready() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    for number, _ in ahead(double, items(), 3):
        time.sleep(0.001)  # the helper has time to run away
        assert len(taken) <= number + 1 + 3


@pytest.mark.usefixtures("threaded")
def test_items_are_taken_and_work_is_done_each_in_one_thread() -> None:
    taking, working = set(), set()

    def items() -> Iterator[int]:
        for number in range(20):
            taking.add(threading.current_thread())
            yield number

    def work(number: int) -> int:
        if number > 1:  # the first are done before it is clear that a thread is worth it
            working.add(threading.current_thread())
        return number

    list(ahead(work, items(), 2))
    assert taking == {threading.current_thread()}
    assert [thread.name for thread in working] == [HELPER]


class Clock:
    """A clock that only slow calls advance, so that the machine's load does not matter."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, number: int) -> int:
        self.now += 0.005
        return number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loader, "perf_counter", clock)
    return clock


def test_cheap_work_is_done_without_a_thread(clock: Clock) -> None:
    for number, _ in ahead(double, iter(range(10)), 2):
        clock.slow(number)
        assert not helpers()


def test_work_for_a_consumer_with_nothing_else_to_do_needs_no_thread(clock: Clock) -> None:
    assert not any(bool(helpers()) for _ in ahead(clock.slow, iter(range(10)), 2))


def test_work_that_can_be_hidden_is_done_ahead(clock: Clock) -> None:
    started = []
    for number, _ in ahead(clock.slow, iter(range(10)), 2):
        started.append(bool(helpers()))
        clock.slow(number)
    assert started[:2] == [False, False]
    assert all(started[2:])
    assert not helpers()


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_in_the_work_reaches_the_consumer_in_its_turn(depth: int) -> None:
    def work(number: int) -> int:
        return 60 // (5 - number)

    stream = ahead(work, iter(range(10)), depth)
    assert [next(stream)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError) as caught:
        next(stream)
    assert "60 // (5 - number)" in "".join(traceback.format_exception(caught.value))
    assert not helpers()


@pytest.mark.usefixtures("threaded")
def test_an_error_in_the_items_ends_the_thread() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(ahead(double, items(), 2))
    assert not helpers()


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("consumed", [1, 2, 5])
def test_closing_early_ends_the_thread(consumed: int) -> None:
    done = []

    def work(number: int) -> int:
        done.append(number)
        return number

    stream = ahead(work, itertools.count(), 4)
    for _ in range(consumed):
        next(stream)
    stream.close()
    assert not helpers()
    assert len(done) <= consumed + 4
    assert next(stream, None) is None


@pytest.mark.usefixtures("threaded")
def test_leaving_a_loop_ends_the_thread() -> None:
    for number, _ in ahead(double, itertools.count(), 4):
        if number == 5:
            break
    assert not helpers(), "nothing else holds the generator, so it is closed at once"


@pytest.mark.usefixtures("threaded")
def test_an_error_in_the_consumer_ends_the_thread() -> None:
    def consume() -> None:
        for number, _ in ahead(double, itertools.count(), 4):
            if number == 5:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        consume()
    deadline = time.monotonic() + 30
    while helpers() and time.monotonic() < deadline:  # the traceback still holds the generator
        time.sleep(0.01)
    assert not helpers()


@pytest.mark.usefixtures("threaded")
def test_an_interrupt_reaches_a_consumer_who_waits() -> None:
    waiting = threading.Event()

    def work(number: int) -> int:
        if number == 5:
            waiting.set()
            time.sleep(0.3)
        return number

    def interrupt() -> None:
        waiting.wait(30)
        time.sleep(0.05)
        _thread.interrupt_main()

    trigger = threading.Thread(target=interrupt, name="trigger")
    trigger.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in ahead(work, itertools.count(), 2):
            pass
    trigger.join()
    assert not helpers()
