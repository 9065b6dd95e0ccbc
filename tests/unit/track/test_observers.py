"""Several observers as one, and slow ones behind a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from echelon.track import Behind, Observers


class Diary:
    """Writes down what it hears; fails on demand."""

    def __init__(self, fails_on: str = "") -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._fails_on = fails_on

    def _hear(self, *what: Any) -> None:
        self.heard.append(what)
        if what[0] == self._fails_on:
            raise RuntimeError(f"cannot hear {what[0]}")

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._hear("started", run, dict(facts))

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._hear("progressed", step, dict(values))

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._hear("logged", step, dict(values))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._hear("evaluated", step, dict(values))

    def noticed(self, step: int, message: str) -> None:
        self._hear("noticed", step, message)

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        self._hear("finished", status, dict(summary))


STORY: list[tuple[Any, ...]] = [
    ("started", "digits-0001", {"epochs": 1}),
    ("progressed", 1, {"loss": 2.0}),
    ("logged", 1, {"loss": 2.0}),
    ("evaluated", 1, {"accuracy": 0.5}),
    ("noticed", 1, "careful"),
    ("finished", "done", {"steps": 1}),
]


def _tell(observer: Any) -> None:
    for name, *arguments in STORY:
        getattr(observer, name)(*arguments)


def test_everything_is_passed_on_to_all() -> None:
    diaries = [Diary(), Diary()]
    _tell(Observers(diaries))
    assert [diary.heard for diary in diaries] == [STORY, STORY]


@pytest.mark.parametrize("kind", [entry[0] for entry in STORY])
def test_one_that_fails_is_told_once_and_left_out(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = Diary(fails_on=kind), Diary()
    observers = Observers([broken, whole])
    _tell(observers)
    _tell(observers)
    assert whole.heard == STORY * 2
    assert broken.heard == STORY[: [entry[0] for entry in STORY].index(kind) + 1]
    said = capsys.readouterr().err
    assert said == f"echelon: Diary failed and is left out: RuntimeError: cannot hear {kind}\n"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_the_end_is_heard_whatever_happens(error: BaseException, status: str) -> None:
    diary = Diary()
    with pytest.raises(type(error)), Observers([diary]):
        raise error
    assert diary.heard == [("finished", status, {})]


def test_the_end_is_heard_once() -> None:
    diary = Diary()
    with Observers([diary]) as observers:
        observers.finished("done", {})
    assert diary.heard == [("finished", "done", {})]


def test_behind_passes_on_all_but_progress_in_order() -> None:
    diary = Diary()
    _tell(Behind(diary))
    assert diary.heard == [entry for entry in STORY if entry[0] != "progressed"]


def test_behind_never_makes_the_loop_wait() -> None:
    may_go_on = threading.Event()

    class Slow(Diary):
        def logged(self, step: int, values: Mapping[str, float]) -> None:
            may_go_on.wait(30)
            super().logged(step, values)

    diary = Slow()
    behind = Behind(diary)
    behind.started("digits-0001", {})
    for step in range(5):
        behind.logged(step, {"loss": 1.0})
    assert [entry[0] for entry in diary.heard] in ([], ["started"])
    may_go_on.set()
    behind.finished("done", {})
    assert [entry[1] for entry in diary.heard[1:-1]] == [0, 1, 2, 3, 4]


def test_behind_tells_of_a_failure_once_and_goes_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    diary = Diary(fails_on="logged")
    behind = Behind(diary)
    behind.started("digits-0001", {})
    for step in range(3):
        behind.logged(step, {})
    behind.finished("done", {})
    assert [entry[0] for entry in diary.heard] == ["started", "logged"]
    assert capsys.readouterr().err.count("Diary failed and is left out") == 1


def test_behind_leaves_out_what_cannot_be_kept_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    may_go_on = threading.Event()

    class Slow(Diary):
        def started(self, run: str, facts: Mapping[str, Any]) -> None:
            super().started(run, facts)
            may_go_on.wait(30)

    diary = Slow()
    behind = Behind(diary, capacity=2)
    behind.started("digits-0001", {})
    for step in range(10):
        behind.logged(step, {})
    may_go_on.set()
    behind.finished("done", {})
    kept = len(diary.heard) - 2
    assert 1 <= kept <= 3
    assert f"could not keep up: {10 - kept} records were left out" in capsys.readouterr().err


def test_behind_that_never_started_just_ends() -> None:
    diary = Diary()
    Behind(diary).finished("failed", {})
    assert diary.heard == []
