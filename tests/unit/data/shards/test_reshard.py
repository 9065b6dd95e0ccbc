"""Resharding keeps records, their order and the statistics, and is atomic."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data import read_manifest, verify_shards, write_shards
from echelon.data.formats import read
from echelon.data.shards import reshard as resharding
from echelon.data.shards.reshard import reshard

ROWS = 101


def columns() -> dict[str, Any]:
    """A column of every kind."""
    random = np.random.default_rng(0)
    lengths = torch.from_numpy(random.integers(0, 5, ROWS))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    return {
        "image": random.integers(0, 256, (ROWS, 1, 4, 4), np.uint8),
        "number": random.normal(size=ROWS),
        "half": torch.arange(ROWS * 3, dtype=torch.bfloat16).view(ROWS, 3),
        "yes": random.integers(0, 2, ROWS).astype(bool),
        "words": [np.arange(n, dtype=np.int32) for n in random.integers(0, 6, ROWS)],
        "bag": Sparse(torch.arange(total) % 50, torch.rand(total), offsets, 50),
        "text": [f"text {n} é" * int(n % 3) for n in range(ROWS)],
        "y": np.arange(ROWS) % 4,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "set", [columns()], rows_per_shard=17)
    return tmp_path / "set"


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for batch in read(folder) for record in batch.to_pylist()]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("limit", [resharding.LIMIT, 0], ids=["in memory", "in files"])
@pytest.mark.parametrize("shards", [1, 6, 60])
def test_records_and_their_order_stay_the_same(
    folder: Path, tmp_path: Path, shards: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding, "LIMIT", limit)
    made = reshard(folder, shards, tmp_path / "new")[""]
    assert records(tmp_path / "new") == records(folder)
    assert verify_shards(tmp_path / "new") == made
    sizes = {shard.rows for shard in made.shards}
    assert len(made.shards) == shards
    assert max(sizes) - min(sizes) <= 1
    before = read_manifest(folder)
    assert made.schema == before.schema
    assert made.statistics == before.statistics


def test_how_it_was_joined_does_not_show(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are identical: joined in memory or in files, directly or in two steps."""
    reshard(folder, 3, tmp_path / "direct")
    reshard(folder, 7, tmp_path / "detour")
    monkeypatch.setattr(resharding, "LIMIT", 0)
    reshard(tmp_path / "detour", 3, tmp_path / "there")
    assert files(tmp_path / "direct") == files(tmp_path / "there")


def test_all_parts_of_a_prepared_folder_are_cut_anew_and_the_rest_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "prepared"
    for part, rows in (("train", 30), ("valid", 5)):
        write_shards(source / part, [{"x": np.arange(rows)}], rows_per_shard=4)
    (source / "learnt").mkdir()
    (source / "learnt" / "x.json").write_text("{}")
    (source / "notes.json").write_text(json.dumps({"a": 1}))
    made = reshard(source, 2, tmp_path / "new")
    assert list(made) == ["train", "valid"]
    assert {name: [s.rows for s in m.shards] for name, m in made.items()} == {
        "train": [15, 15],
        "valid": [3, 2],
    }
    new = files(tmp_path / "new")
    assert new["learnt/x.json"] == b"{}"
    assert new["notes.json"] == b'{"a": 1}'
    assert [r["x"] for r in records(tmp_path / "new" / "train")] == list(range(30))
    assert not list(tmp_path.glob(".*"))


def test_in_place_replaces_the_folder_as_a_whole(folder: Path) -> None:
    before = records(folder)
    with pytest.raises(DataError, match="name another folder, or say --overwrite"):
        reshard(folder, 2)
    reshard(folder, 2, overwrite=True)
    assert sorted(files(folder)) == ["manifest.json", "shard-00000.arrow", "shard-00001.arrow"]
    assert records(folder) == before
    assert not list(folder.parent.glob(".*"))


def test_a_damaged_shard_is_refused_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    path = folder / "shard-00004.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    before = files(folder)
    for to in (None, tmp_path / "new"):
        with pytest.raises(DataError, match=r"shard-00004\.arrow: corrupt: checksum of block 0"):
            reshard(folder, 2, to, overwrite=True)
    assert files(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_disk_that_is_full_is_one_line_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("echelon.data.shards.reshard.write_shard", full)
    with pytest.raises(DataError, match="new: cannot be written: No space left on device"):
        reshard(folder, 2, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        (0, "shards is 0: it must be at least 1"),
        (ROWS + 1, "101 records cannot be cut into 102 shards: each needs one"),
    ],
)
def test_a_number_that_cannot_be_is_refused(folder: Path, shards: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        reshard(folder, shards, folder.parent / "new")


def test_what_is_not_a_set_of_shards_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="mine: holds other files"):
        reshard(folder, 2, tmp_path / "mine", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file: holds other files"):
        reshard(folder, 2, tmp_path / "file", overwrite=True)
    reshard(folder, 3, tmp_path / "new")
    with pytest.raises(DataError, match="new: holds shards already; say --overwrite"):
        reshard(folder, 2, tmp_path / "new")
    assert len(reshard(folder, 2, tmp_path / "new", overwrite=True)[""].shards) == 2
    with pytest.raises(DataError, match="or the other way round"):
        reshard(folder, 2, folder / "inside")
    with pytest.raises(DataError, match="neither it nor a folder in it"):
        reshard(tmp_path / "mine", 2, tmp_path / "x")


def test_nothing_is_begun_before_all_that_is_needed_is_imported(
    folder: Path, tmp_path: Path
) -> None:
    """Ctrl-C during the import of torch ends a command at once, without cleaning up."""
    look = (
        "import sys; from echelon.data.shards import reshard as module\n"
        "before = module._copy_others\n"
        "def copy(*where): print('torch' in sys.modules); before(*where)\n"
        "module._copy_others = copy; module.reshard(sys.argv[1], 2, sys.argv[2])"
    )
    command = [sys.executable, "-c", look, str(folder), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
