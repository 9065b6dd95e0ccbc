"""Saving in the background: order, full disks, errors, values that are not finite."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.checkpoint import Shelf, Writer, writer
from echelon.checkpoint.state import Flat
from echelon.core.errors import CheckpointError, NonFiniteError


def state(version: int, size: int = 4) -> dict[str, Any]:
    weights = {"w": torch.full((size,), float(version))}
    return {"strategy": {"model": weights, "version": version}}


def at(shelf: Shelf, which: str = "last") -> int:
    found: int = shelf.load(which)["strategy"]["version"]
    return found


@contextmanager
def full_disk(size: int = 4096) -> Iterator[None]:
    """No file can grow beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Slow(Shelf):
    """A disk that takes its time."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.reached, self.free = threading.Event(), threading.Event()

    def put(self, version: int, flat: Flat, proceed: Callable[[], None] = lambda: None) -> Path:
        self.reached.set()
        while not self.free.wait(0.01):
            proceed()
        return super().put(version, flat, proceed)


def test_what_is_written_is_the_state_as_it_was_when_it_was_saved(tmp_path: Path) -> None:
    shelf, cut = Slow(tmp_path), state(1)
    with Writer(shelf) as saver:
        saver.prepare(cut)
        saver.save(1, cut)
        assert saver.busy
        cut["strategy"]["model"]["w"].fill_(99.0)
        cut["strategy"]["version"] = 99
        shelf.free.set()
        saver.flush()
        assert (saver.saved, saver.busy) == (1, False)
    assert at(shelf) == 1
    assert torch.equal(shelf.load()["strategy"]["model"]["w"], torch.ones(4))


def test_all_is_done_in_the_order_it_was_asked_for(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=1)
    with Writer(shelf) as saver:
        for version in range(1, 6):
            saver.save(version, state(version))
            if version in (2, 4):
                saver.mark_best(version)
        saver.finish(5)
        assert (shelf.versions(), shelf.best()) == ([4, 5], 4)


def test_closing_waits_for_what_is_being_written(tmp_path: Path) -> None:
    with Writer(Shelf(tmp_path)) as saver:
        saver.save(7, state(7, 1 << 20))
    assert at(Shelf(tmp_path)) == 7


def test_a_run_that_is_ended_at_once_leaves_its_write(tmp_path: Path) -> None:
    shelf = Slow(tmp_path)

    def ended() -> None:
        with Writer(shelf) as saver:
            saver.save(7, state(7))
            assert shelf.reached.wait(30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_training_goes_on_with_the_one_before(tmp_path: Path) -> None:
    told: list[str] = []
    shelf = Shelf(tmp_path)
    with Writer(shelf, notice=told.append) as saver:
        saver.save(400, state(400, 4000))
        saver.flush()
        with full_disk():
            saver.save(500, state(500, 4000))
            saver.mark_best(500)
            saver.flush()
        assert [path.name for path in tmp_path.iterdir()] == ["step-0000000400"]
        assert told == [
            "the checkpoint of step 500 could not be written: [Errno 27] File too large; "
            "training goes on with the one of step 400"
        ]
        saver.save(600, state(600, 4000))
        saver.finish(600)
    assert at(shelf) == 600


def test_a_disk_that_was_full_when_a_run_was_over_is_tried_again(tmp_path: Path) -> None:
    told: list[str] = []
    with Writer(Shelf(tmp_path), notice=told.append) as saver:
        with full_disk():
            saver.save(1, state(1, 4000))
            saver.flush()
            assert told[0].endswith("training goes on without any so far")
            with pytest.raises(CheckpointError, match=r"step-0000000001: .*File too large"):
                saver.finish(1)
        saver.finish(1)
    assert at(Shelf(tmp_path)) == 1


def test_the_last_save_fails_aloud(tmp_path: Path) -> None:
    with Writer(Shelf(tmp_path)) as saver:
        with full_disk(), pytest.raises(CheckpointError, match="File too large"):
            saver.save_now(1, state(1, 4000))
        assert list(tmp_path.iterdir()) == []
        saver.save_now(1, state(1, 4000))
        saver.finish(1)
    assert at(Shelf(tmp_path)) == 1


def test_a_disk_too_small_is_not_filled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"No space left.*: 16 bytes are needed, 10 are free"):
        Shelf(tmp_path).save(1, state(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_nothing_at_all_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Writer(Shelf(tmp_path / "file" / "checkpoints")) as saver:
        saver.save(1, state(1))
        with pytest.raises(CheckpointError, match="cannot write"):
            saver.flush()
        saver.check()


def test_values_that_are_not_finite_are_found_in_the_copy(tmp_path: Path) -> None:
    spoilt = state(3)
    spoilt["strategy"]["model"]["w"][2] = torch.nan
    with Writer(Shelf(tmp_path)) as saver:
        saver.save(3, spoilt)
        with pytest.raises(NonFiniteError, match="step 3: 'w' is not finite"):
            saver.flush()
        with pytest.raises(NonFiniteError, match="this checkpoint is not written"):
            saver.save_now(3, spoilt)
        saver.save(4, state(4) | {"loop": torch.tensor(torch.nan)})
        saver.finish(4)
    assert Shelf(tmp_path).versions() == [4]


def test_training_that_has_to_wait_for_the_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LONG", 0.0)
    told: list[str] = []
    shelf = Slow(tmp_path)
    with Writer(shelf, notice=told.append) as saver:
        saver.save(1, state(1))
        threading.Timer(0.05, shelf.free.set).start()
        saver.save(2, state(2))
        saver.finish(2)
    assert [line for line in told if "s to save step 2: the checkpoint of step 1" in line]


def test_without_memory_for_a_copy_states_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "available_memory", lambda: 0)
    told: list[str] = []
    with Writer(Shelf(tmp_path), notice=told.append) as saver:
        for version in (1, 2):
            saver.save(version, state(version))
            assert saver.saved == version
        with full_disk():
            saver.save(3, state(3, 4000))
        saver.finish(3)
    assert told[0] == "checkpoints are written while training waits: there is no memory for a copy"
    assert told[1].endswith("training goes on with the one of step 2")
    assert (len(told), at(Shelf(tmp_path))) == (2, 3)


def test_a_best_that_cannot_be_marked_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "best").mkdir()
    with Writer(Shelf(tmp_path), notice=told.append) as saver:
        saver.save(1, state(1))
        saver.mark_best(1)
        saver.flush()
    assert told[0].startswith("cannot mark step 1 as the best")
    assert not (tmp_path / ".best").exists()
