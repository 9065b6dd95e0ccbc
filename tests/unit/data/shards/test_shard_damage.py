"""A damaged set is refused with the file and the records; damage is never skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data import ShardSource, verify_shards, write_shards

ROWS, PER_SHARD, WIDTH = 3000, 1000, 3072


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of about 3 MB: three checksummed blocks each."""
    x = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), np.uint8)
    write_shards(tmp_path / "set", [{"x": x, "y": np.arange(ROWS)}], rows_per_shard=PER_SHARD)
    return tmp_path / "set"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_flipped_byte_is_found_and_its_records_are_named(folder: Path) -> None:
    flip(folder / "shard-00001.arrow", 2 * 2**20 + 500)
    with pytest.raises(DataError) as error:
        verify_shards(folder)
    message = str(error.value)
    assert "shard-00001.arrow: corrupt: checksum of block 2 is wrong; column 'x'" in message
    assert message.endswith(" or column 'y', records 1000–1999")  # in the same block
    told = message.removesuffix(" or column 'y', records 1000–1999").rpartition("records ")[2]
    first, last = (int(part) for part in told.split("–"))
    damaged = PER_SHARD + (2 * 2**20 + 500) // WIDTH
    assert first <= damaged <= last
    assert last - first < 2**20 // WIDTH + 2


def test_checksums_are_compared_when_a_shard_is_first_touched(folder: Path) -> None:
    flip(folder / "shard-00002.arrow", 70_000)
    source = ShardSource(folder, verify=True)
    assert len(source.gather(torch.tensor([0, 1500]))["y"]) == 2
    for _ in range(2):
        with pytest.raises(DataError, match=r"shard-00002.arrow: corrupt"):
            source.gather(torch.tensor([0, 2500]))


@pytest.mark.parametrize("column", ["words", "bag"])
def test_damage_to_sequences_is_placed_by_their_offsets(column: str, tmp_path: Path) -> None:
    flat = torch.arange(300_000)
    offsets = torch.arange(0, 300_001, 300)
    values = {
        "words": [part.numpy() for part in flat.split(300)],
        "bag": Sparse(flat, flat.float(), offsets, 300_000),
    }
    write_shards(tmp_path / "set", [{column: values[column]}])
    size = (tmp_path / "set" / "shard-00000.arrow").stat().st_size
    flip(tmp_path / "set" / "shard-00000.arrow", size - 4096)
    with pytest.raises(DataError, match=rf"column '{column}', records [5-9]\d\d–999"):
        verify_shards(tmp_path / "set")


def test_offsets_that_lead_outside_are_refused_even_unverified(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": [np.arange(3)] * 100}])
    path = tmp_path / "set" / "shard-00000.arrow"
    content = bytearray(path.read_bytes())
    at = content.find(np.arange(0, 303, 3).tobytes())
    content[at + 8 * 50 : at + 8 * 51] = np.int64(10**9).tobytes()
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"corrupt: offsets of column 'x', record 49"):
        ShardSource(tmp_path / "set").gather(torch.arange(60))
    for last, message in ((10**9, "not a whole Arrow file"), (297, "corrupt: offsets of column")):
        content[at + 8 * 100 : at + 8 * 101] = np.int64(last).tobytes()
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"shard-00000.arrow: {message}"):
            ShardSource(tmp_path / "set")


def other_arrow(path: Path, table: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def scribble(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot be opened: No such file or directory; it holds records 1000–1999"),
        (truncate, "truncated: "),
        (lengthen, "too long: "),
        (scribble, "not a whole Arrow file: "),
        (replace_by_folder, "is not a file; it holds "),
    ],
)
def test_a_missing_short_long_or_overwritten_file_is_found_at_once(
    damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    damage(folder / "shard-00001.arrow")
    with pytest.raises(DataError) as error:
        ShardSource(folder)
    assert f"shard-00001.arrow: {message}" in str(error.value)
    assert "records 1000–1999" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"z": [1, 2]}), "its columns are z (int64)"),
        (pa.table({"x": [1, 2, 3]}), "3 records instead of 2"),
        (pa.table({"x": [1, None]}), "column 'x' has missing values"),
        (pa.table({"x": pa.chunked_array([[1], [2]])}), "2 record batches instead of 1"),
    ],
)
def test_a_file_of_another_set_is_refused(table: Any, message: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": np.arange(2)}])
    path = tmp_path / "set" / "shard-00000.arrow"
    other_arrow(path, table)
    manifest = tmp_path / "set" / "manifest.json"
    plain = json.loads(manifest.read_text())
    plain["shards"][0]["bytes"] = path.stat().st_size
    manifest.write_text(json.dumps(plain))
    with pytest.raises(DataError) as error:
        ShardSource(tmp_path / "set")
    assert f"does not belong to this set: {message}; records 0–1" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not describe shards"),
        ({"version": 99}, "written by version 99 of the format; this program reads version 1"),
        ({"rows": 1}, "says 1 records, but its shards have 2"),
        ({"schema": None}, "not a whole manifest"),
        ({"schema": [{"name": "x", "kind": "dense", "dtype": "float7"}]}, "dtype 'float7'"),
        ({"schema": [{"name": "x", "kind": "odd", "dtype": "int64"}]}, "kind 'odd'"),
        (
            {"shards": [{"file": "../x", "rows": 2, "bytes": 1, "crc32": []}]},
            "file '../x' is not a plain name",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_shards(tmp_path / "set", [{"x": np.arange(2)}])
    manifest = tmp_path / "set" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(DataError) as error:
        ShardSource(tmp_path / "set")
    assert "manifest.json" in str(error.value)
    assert message in str(error.value)


def test_a_torn_or_missing_manifest_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": np.arange(2)}])
    manifest = tmp_path / "set" / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    with pytest.raises(DataError, match=r"manifest.json: cannot be read as JSON"):
        ShardSource(tmp_path / "set")
    manifest.unlink()
    with pytest.raises(DataError, match="not a folder of shards"):
        ShardSource(tmp_path / "set")
    with pytest.raises(DataError, match="not a folder of shards"):
        ShardSource(tmp_path / "nowhere")


def test_columns_that_are_not_there_or_are_text_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"pixels": np.arange(2), "text": ["a", "b"]}])
    with pytest.raises(DataError, match=r"column 'pixel' is unknown; did you mean 'pixels'"):
        ShardSource(tmp_path / "set", ["pixel"])
    with pytest.raises(DataError, match="column 'text' is text, which is not gathered"):
        ShardSource(tmp_path / "set", ["pixels", "text"])
    write_shards(tmp_path / "texts", [{"text": ["a", "b"]}])
    with pytest.raises(DataError, match="all columns are text"):
        ShardSource(tmp_path / "texts")


@pytest.mark.parametrize("row", [-1, 3000])
def test_rows_outside_of_the_set_are_refused(row: int, folder: Path) -> None:
    with pytest.raises(IndexError, match="of 3000 records"):
        ShardSource(folder).gather(torch.tensor([row]))


def test_a_manifest_with_too_few_checksums_is_not_trusted(folder: Path) -> None:
    manifest = folder / "manifest.json"
    plain = json.loads(manifest.read_text())
    plain["shards"][0]["crc32"].pop()
    manifest.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=r"shard-00000.arrow: corrupt"):
        verify_shards(folder)


def test_damage_to_texts_is_found_too(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"text": ["some words"] * 100, "x": [[]] * 100}])
    path = tmp_path / "set" / "shard-00000.arrow"
    flip(path, path.read_bytes().find(b"some wordssome"))
    with pytest.raises(DataError, match=r"is wrong; one of columns 'text', 'x', records 0–99"):
        verify_shards(tmp_path / "set")
    write_shards(tmp_path / "texts", [{"text": ["some words"] * 100}])
    path = tmp_path / "texts" / "shard-00000.arrow"
    flip(path, path.read_bytes().find(b"some wordssome"))
    with pytest.raises(DataError, match=r"block 0 is wrong; column 'text', records 0–99"):
        verify_shards(tmp_path / "texts")


def test_a_file_that_cannot_be_mapped_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 3081098 bytes: Cannot allocate memory\nC++ frames …")

    monkeypatch.setattr(torch, "from_file", refuse)
    with pytest.raises(DataError, match=r"shard-00000.arrow: cannot be mapped: .* memory; it hol"):
        ShardSource(folder)
