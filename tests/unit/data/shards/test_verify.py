"""`verify` finds every damage, and refuses a folder that is not a set of shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.errors import DataError
from echelon.data import write_shards
from echelon.data.shards.verify import verify

ROWS = 3000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts of three shards, each of about 1.5 MB: two checksummed blocks."""
    x = np.random.default_rng(0).integers(0, 256, (ROWS, 1500), np.uint8)
    for part in ("train", "test"):
        write_shards(tmp_path / "set" / part, [{"x": x, "y": np.arange(ROWS)}], rows_per_shard=1000)
    return tmp_path / "set"


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0xFF
    path.write_bytes(content)


def test_a_whole_folder_is_counted(folder: Path) -> None:
    found = verify(folder)
    assert (found.sets, found.shards, found.records) == (2, 6, 2 * ROWS)
    assert found.bytes == sum(path.stat().st_size for path in folder.glob("*/*.arrow"))
    assert found.findings == []
    assert found.as_data()["ok"] is True
    assert verify(folder / "test").sets == 1


def test_every_damage_is_found_whatever_it_is(folder: Path) -> None:
    flip(folder / "train" / "shard-00001.arrow", 500_000, 600_000, 1_300_000)
    (folder / "train" / "shard-00002.arrow").unlink()
    with (folder / "test" / "shard-00000.arrow").open("r+b") as file:
        file.truncate(1000)
    found = verify(folder)
    told = [finding.message.partition("set/")[2] for finding in found.findings]
    assert [line.partition(";")[0].rpartition(": ")[0] for line in told] == [
        "train/shard-00001.arrow: corrupt",
        "train/shard-00001.arrow: corrupt",
        "train/shard-00002.arrow: cannot be opened",
        "test/shard-00000.arrow: truncated",
    ]
    assert found.files == 3
    assert found.as_data()["ok"] is False
    first, second, missing, _ = found.findings
    assert (first.columns, missing.columns) == (("x",), ())
    assert missing.records == (2000, 2999)
    assert first.records is not None
    assert second.records is not None
    assert 1000 <= first.records[0] <= 1000 + 500_000 // 1500 <= first.records[1]
    assert second.records[0] <= 1000 + 1_300_000 // 1500 <= second.records[1] <= 1999


def test_no_column_is_named_that_may_be_whole(tmp_path: Path) -> None:
    """A checksum over several columns does not show which of them is damaged."""
    table = pa.table({"id": range(400), "t": [f"text {at}" for at in range(400)], "y": [1.5] * 400})
    write_shards(tmp_path / "set", table.to_batches())
    path = tmp_path / "set" / "shard-00000.arrow"
    flip(path, path.read_bytes().find(np.full(400, 1.5).tobytes()) + 80)
    (found,) = verify(tmp_path / "set").findings
    assert found.columns == ("id", "t", "y")
    assert found.records == (0, 399)
    assert found.message == (
        f"{path}: corrupt: checksum of block 0 is wrong; one of columns 'id', 't', 'y', "
        "records 0–399"
    )


def test_a_torn_manifest_is_a_damage_like_any_other(folder: Path) -> None:
    (folder / "train" / "manifest.json").write_text('{"format": "echelon-sh')
    found = verify(folder)
    assert [finding.file for finding in found.findings] == [str(folder / "train" / "manifest.json")]
    assert found.records == ROWS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "there is no such folder"),
        ("file", "is a file, not a folder of shards"),
        ("empty", "not a folder of shards: neither it nor a folder in it has a manifest.json"),
    ],
)
def test_what_is_no_folder_of_shards_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=said):
        verify(tmp_path / name)
