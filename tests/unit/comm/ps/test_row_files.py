"""Rows spooled to files on their way into a checkpoint: no file is left or mistaken for another."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.comm.ps.row_files import Spool, State
from echelon.core import files

BLANK = {
    "ids": torch.empty(3, dtype=torch.int64, device="meta"),
    "rows": torch.empty(3, 2, device="meta"),
}
PART = {"ids": torch.tensor([4, 5, 6]), "rows": torch.arange(6.0).view(3, 2)}


def spool_in(folder: Path) -> Spool:
    spool = Spool()
    spool.folder = folder
    return spool


def cut(spool: Spool) -> State:
    spool.begin()
    columns = spool.columns(BLANK)
    columns.add({name: value.view(-1) for name, value in PART.items()})
    whole = columns.whole()
    columns.close()
    return whole


def check(whole: State) -> None:
    for name, value in PART.items():
        assert torch.equal(whole[name], value), name


def test_files_of_one_that_led_in_between_and_was_killed_go(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    cut(first)
    killed = tmp_path / f"{files.START}1-0"
    killed.write_bytes(b"rows")
    check(cut(first))  # it leads again
    assert not killed.exists()
    assert len(list(tmp_path.iterdir())) == 2, "its last cut may still be on its way"
    first.close()
    assert not list(tmp_path.iterdir())


def test_rows_are_right_where_another_took_the_name_of_their_file_away(tmp_path: Path) -> None:
    frozen, other = spool_in(tmp_path), spool_in(tmp_path)
    frozen.begin()
    columns = frozen.columns(BLANK)
    columns.add(PART)
    check(cut(other))
    check(columns.whole())
    columns.close()
    frozen.close()
    other.close()
    assert not list(tmp_path.iterdir())
