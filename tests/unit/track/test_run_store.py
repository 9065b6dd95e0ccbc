"""The store: ids, figures, finding runs again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import RunError
from echelon.track import Point, Store


def test_runs_of_a_name_are_numbered_and_have_a_folder(store: Store) -> None:
    ids = [store.create(name, {}, {}) for name in ("digits", "digits", "gpt")]
    assert ids == ["digits-0001", "digits-0002", "gpt-0001"]
    assert all((store.folder / run).is_dir() for run in ids)


def test_a_folder_that_outlived_its_store_is_not_taken_again(store: Store) -> None:
    (store.folder / "digits-0007").mkdir(parents=True)
    assert store.create("digits", {}, {}) == "digits-0008"


@pytest.mark.parametrize(
    ("name", "run"),
    [("a b/c", "a-b-c-0001"), ("../../etc", "etc-0001"), ("", "run-0001"), ("数字", "run-0001")],
)
def test_any_name_becomes_a_safe_folder(store: Store, name: str, run: str) -> None:
    assert store.create(name, {}, {}) == run
    assert (store.folder / run).is_dir()


def test_a_new_run_is_running_and_knows_its_machine(store: Store, facts: dict[str, Any]) -> None:
    run = store.run(store.create("digits", {"epochs": 3}, facts))
    assert (run.status, run.task, run.strategy, run.steps) == ("running", "digits", "single", 0)
    assert run.config == {"epochs": 3}
    assert run.facts["environment"]["cores"] >= 1
    assert run.finished is None
    assert run.best is None
    assert 0 <= run.seconds < 60


def test_facts_that_come_later_are_added(store: Store) -> None:
    run = store.create("digits", {}, {"task": "digits"})
    store.describe(run, {"parameters": 7})
    found = store.run(run).facts
    assert (found["task"], found["parameters"]) == ("digits", 7)


def test_a_finished_run_keeps_its_summary(trained: Callable[..., str], store: Store) -> None:
    run = store.run(trained())
    assert (run.status, run.steps, run.seconds) == ("done", 200, 4.0)
    assert run.metrics == {"loss": 0.0785, "accuracy": 0.9817}
    assert run.best == ("accuracy", 0.9817, 200)
    assert run.finished is not None


def test_the_headline_is_a_metric_even_if_the_best_is_a_loss(store: Store) -> None:
    run = store.create("digits", {}, {})
    best = {"metric": "loss", "value": 0.1, "step": 9}
    store.finish(run, "done", {"metrics": {"loss": 0.2, "accuracy": 0.9}, "best": best})
    found = store.run(run)
    assert found.best == ("loss", 0.1, 9)
    assert found.headline == ("accuracy", 0.9, None)


def test_without_a_best_the_last_metric_counts(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.finish(run, "stopped", {"metrics": {"loss": 0.2}, "best": None})
    assert store.run(run).headline == ("loss", 0.2, None)


def test_series_come_back_in_the_order_of_steps(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.add_points(run, [Point(s, "train/loss", 1 / s, 10.0 + s) for s in (30, 10, 20)])
    series = store.series(run, "train/loss")
    assert series == ([10, 20, 30], [0.1, 0.05, 1 / 30], [20.0, 30.0, 40.0])
    assert store.names(run) == ["train/loss"]
    assert store.run(run).steps == 30


def test_values_that_are_not_finite_survive(store: Store) -> None:
    run = store.create("digits", {}, {})
    values = [math.nan, math.inf, -math.inf]
    store.add_points(run, [Point(i, "train/loss", v, 0.0) for i, v in enumerate(values)])
    found = store.series(run, "train/loss").values
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_a_series_that_was_never_recorded_is_empty(store: Store) -> None:
    assert store.series(store.create("digits", {}, {}), "valid/loss") == ([], [], [])


def test_a_point_given_again_replaces_the_old_one(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.add_points(run, [Point(5, "train/loss", 1.0, 0.0)])
    store.add_points(run, [Point(5, "train/loss", 2.0, 0.0)])
    assert store.series(run, "train/loss").values == [2.0]


def test_events_keep_their_order(store: Store) -> None:
    run = store.create("digits", {}, {})
    for step, message in ((9, "second"), (3, "first of all")):
        store.add_event(run, step, message)
    assert [(e.step, e.message) for e in store.events(run)] == [(9, "second"), (3, "first of all")]


@pytest.mark.parametrize("text", ["digits-0002", "digits-0002/", "{}/digits-0002", "last"])
def test_a_run_is_found_by_id_path_or_as_the_last(store: Store, text: str) -> None:
    for _ in range(2):
        store.create("digits", {}, {})
    assert store.run(text.format(store.folder)).id == "digits-0002"


def test_a_path_is_not_taken_for_a_run_of_the_same_id_elsewhere(store: Store) -> None:
    store.create("digits", {}, {})
    with pytest.raises(RunError, match=r"'other/digits-0001' is not in .*: say --folder other, or"):
        store.run("other/digits-0001")


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(store: Store) -> None:
    store.create("digits", {}, {})
    store.create("gpt", {}, {})
    assert store.run("d").id == "digits-0001"


def test_a_beginning_shared_by_several_is_refused(store: Store) -> None:
    for _ in range(2):
        store.create("digits", {}, {})
    with pytest.raises(RunError, match=r"'dig' could be any of 2: digits-0002, digits-0001"):
        store.run("dig")


def test_an_unknown_run_is_refused_with_the_nearest(store: Store) -> None:
    for _ in range(10):
        store.create("digits", {}, {})
    with pytest.raises(RunError, match=r"did you mean 'digits-0003'\?.*… 2 more"):
        store.run("digit-0003")


def test_an_empty_folder_says_so_and_reading_makes_nothing(store: Store) -> None:
    assert store.runs() == []
    with pytest.raises(RunError, match="there are no runs in"):
        store.run("last")
    assert not store.folder.exists()


def test_the_latest_run_is_listed_first(store: Store) -> None:
    ids = [store.create(name, {}, {}) for name in "abc"]
    assert [run.id for run in store.runs()] == ids[::-1]


@pytest.mark.parametrize("change", ["describe", "finish", "record"])
def test_a_run_that_is_not_there_cannot_be_changed(store: Store, change: str) -> None:
    store.create("digits", {}, {})
    calls: dict[str, Callable[[], None]] = {
        "describe": lambda: store.describe("gone-0001", {}),
        "finish": lambda: store.finish("gone-0001", "done", {}),
        "record": lambda: store.record("gone-0001", [], []),
    }
    with pytest.raises(RunError, match=r"'gone-0001' is not in .*echelon\.db"):
        calls[change]()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write runs here"):
        Store(tmp_path / "file" / "runs").create("digits", {}, {})


def test_a_folder_that_cannot_be_written_is_a_user_s_mistake() -> None:
    # Folders of processes exist, and not even root can make anything in them.
    with pytest.raises(RunError, match=r"^/proc/self: cannot write runs here: .+track\.folder"):
        Store("/proc/self").create("digits", {}, {})
