"""A checkpoint is written only after the journal has recorded its updates."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import Shelf, Writer
from echelon.core.errors import PeerError

STATE = {"strategy": {"model": {"weight": torch.ones(3)}}}


def test_it_waits_until_the_updates_are_on_record(tmp_path: Path) -> None:
    recorded: list[int] = []
    shelf = Shelf(tmp_path)
    with Writer(shelf, allowed=lambda version: True if version in recorded else None) as writer:
        writer.save(7, STATE)
        time.sleep(0.1)
        assert shelf.versions() == []
        assert writer.busy
        recorded.append(7)
        writer.flush()
    assert shelf.versions() == [7]


def test_what_never_comes_on_record_is_not_written(tmp_path: Path) -> None:
    notices: list[str] = []
    shelf = Shelf(tmp_path)
    with Writer(shelf, notice=notices.append, allowed=lambda _version: False) as writer:
        writer.save(7, STATE)
        writer.flush()
        with pytest.raises(PeerError, match="step 8 is not on record"):
            writer.save_now(8, STATE)
    assert (shelf.versions(), notices) == ([], [])


def test_a_run_that_is_ended_at_once_does_not_wait(tmp_path: Path) -> None:
    writer = Writer(Shelf(tmp_path), allowed=lambda _version: None)
    writer.save(7, STATE)
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert Shelf(tmp_path).versions() == []
