"""The recorder: cheap for the loop, nothing lost, a broken store only costs a warning."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from echelon.track import Recorder, Store, observers


def _wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_everything_observed_is_in_the_store(store: Store) -> None:
    run = store.create("digits", {}, {})
    watch = Recorder(store, run)
    watch.started(run, {"parameters": 12})
    for step in (50, 100):
        watch.progressed(step, {"loss": 9.0})
        watch.logged(step, {"loss": 1 / step, "lr": 0.1})
    watch.evaluated(100, {"loss": 0.5, "accuracy": 0.75})
    watch.noticed(100, "careful")
    watch.finished("done", {"steps": 100, "metrics": {"accuracy": 0.75}})
    assert store.series(run, "train/loss")[:2] == ([50, 100], [0.02, 0.01])
    assert store.series(run, "valid/accuracy")[:2] == ([100], [0.75])
    assert [event.message for event in store.events(run)] == ["careful"]
    found = store.run(run)
    assert (found.status, found.facts["parameters"]) == ("done", 12)
    assert found.metrics == {"accuracy": 0.75}


def test_figures_are_written_while_the_run_goes_on(store: Store) -> None:
    run = store.create("digits", {}, {})
    watch = Recorder(store, run, interval=0.02)
    watch.started(run, {})
    watch.logged(7, {"loss": 1.0})
    _wait_until(lambda: store.series(run, "train/loss").steps == [7])
    watch.finished("done", {})


def test_an_evaluation_is_written_at_once(store: Store) -> None:
    run = store.create("digits", {}, {})
    watch = Recorder(store, run, interval=600.0)
    watch.started(run, {})
    watch.evaluated(7, {"loss": 1.0})
    _wait_until(lambda: store.series(run, "valid/loss").steps == [7])
    watch.finished("done", {})


def test_the_loop_may_reuse_its_mapping(store: Store) -> None:
    run = store.create("digits", {}, {})
    watch = Recorder(store, run)
    values = {"loss": 1.0}
    watch.logged(1, values)
    values["loss"] = 2.0
    watch.logged(2, values)
    watch.finished("done", {})
    assert store.series(run, "train/loss").values == [1.0, 2.0]


def test_a_value_that_is_no_number_is_refused_where_it_was_given(store: Store) -> None:
    watch = Recorder(store, store.create("digits", {}, {}))
    with pytest.raises(ValueError, match="could not convert"):
        watch.logged(1, {"loss": "high"})  # type: ignore[dict-item]


def test_a_store_that_breaks_is_told_once_and_training_goes_on(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = store.create("digits", {}, {})
    store.path.write_bytes(b"no database" * 1000)
    watch = Recorder(store, run, interval=0.01)
    watch.started(run, {})
    for step in range(5):
        watch.evaluated(step, {"loss": 1.0})
        time.sleep(0.02)
    watch.finished("done", {})
    said = capsys.readouterr().err
    assert said.count("is not being recorded") == 1
    assert f"5 records of run {run} could not be kept" in said


def test_records_wait_for_a_store_that_comes_back(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = store.create("digits", {}, {})
    aside = store.path.with_name("aside.db")
    store.path.rename(aside)
    store.path.write_bytes(b"no database" * 1000)
    watch = Recorder(store, run, interval=0.01)
    watch.started(run, {})
    watch.logged(1, {"loss": 1.0})
    _wait_until(lambda: "is not being recorded" in capsys.readouterr().err)
    watch.logged(2, {"loss": 2.0})
    aside.replace(store.path)
    watch.finished("done", {})
    assert store.series(run, "train/loss")[:2] == ([1, 2], [1.0, 2.0])
    assert store.run(run).status == "done"


def test_while_the_store_is_broken_only_the_latest_records_are_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observers, "CAPACITY", 10)
    run = store.create("digits", {}, {})
    whole = store.path.read_bytes()
    store.path.write_bytes(b"no database" * 1000)
    watch = Recorder(store, run)
    for step in range(8):
        watch.logged(step, {"loss": 1.0})
    watch.close()
    for step in range(8, 12):
        watch.logged(step, {"loss": 1.0})
    store.path.write_bytes(whole)
    watch.close()
    assert store.series(run, "train/loss").steps == list(range(2, 12))
    assert "8 records" in capsys.readouterr().err


def test_no_thread_is_left(store: Store) -> None:
    run = store.create("digits", {}, {})
    watch = Recorder(store, run)
    watch.started(run, {})
    assert any(thread.name == "echelon-recorder" for thread in threading.enumerate())
    watch.finished("failed", {})
    assert not any(thread.name == "echelon-recorder" for thread in threading.enumerate())
