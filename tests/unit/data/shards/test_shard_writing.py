"""A set of shards is written completely or not at all; unsupported values are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data import ShardSource, read_manifest, verify_shards, write_shards
from echelon.data.batch import dense


def numbers(rows: int, start: int = 0) -> dict[str, Any]:
    return {"x": np.arange(start, start + rows, dtype=np.float32)}


def test_an_error_in_mid_stream_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield numbers(100)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_shards(tmp_path / "set", broken(), rows_per_shard=10)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_the_old_set_in_place(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [numbers(5)])

    def interrupted() -> Iterator[dict[str, Any]]:
        yield numbers(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "set", interrupted(), rows_per_shard=10, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]
    assert len(ShardSource(tmp_path / "set")) == 5


def test_overwriting_replaces_the_whole_set(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [numbers(50)], rows_per_shard=5)
    write_shards(tmp_path / "set", [numbers(3, start=7)], overwrite=True)
    assert dense(ShardSource(tmp_path / "set").gather(torch.arange(3)), "x").tolist() == [7, 8, 9]
    assert sorted(file.name for file in (tmp_path / "set").iterdir()) == [
        "manifest.json",
        "shard-00000.arrow",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_a_set_or_other_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [numbers(5)])
    with pytest.raises(DataError, match="holds shards already; say overwrite=True"):
        write_shards(tmp_path / "set", [numbers(5)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="holds other files"):
        write_shards(tmp_path / "mine", [numbers(5)], overwrite=True)
    with pytest.raises(DataError, match="is a file; shards need a folder"):
        write_shards(tmp_path / "mine" / "thesis.tex", [numbers(5)], overwrite=True)
    (tmp_path / "empty").mkdir()
    assert write_shards(tmp_path / "empty", [numbers(5)]).rows == 5


def test_batches_are_cut_into_shards_of_the_asked_size(tmp_path: Path) -> None:
    batches = [numbers(7), numbers(0), numbers(1, 7), numbers(13, 8)]
    manifest = write_shards(tmp_path / "set", batches, rows_per_shard=5)
    assert [shard.rows for shard in manifest.shards] == [5, 5, 5, 5, 1]
    source = ShardSource(tmp_path / "set")
    assert dense(source.gather(torch.arange(21)), "x").tolist() == list(range(21))


def test_without_a_size_shards_are_cut_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.data.shards.write.TARGET_BYTES", 4000)
    manifest = write_shards(tmp_path / "set", [numbers(2500)])
    assert [shard.rows for shard in manifest.shards] == [1000, 1000, 500]


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path / "set", [numbers(5)], rows_per_shard=3)
    assert read_manifest(tmp_path / "set") == manifest == verify_shards(tmp_path / "set")
    plain = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert plain["schema"] == [{"name": "x", "kind": "dense", "dtype": "float32", "shape": []}]
    assert [shard["rows"] for shard in plain["shards"]] == [3, 2]
    assert manifest.bytes == sum(f.stat().st_size for f in (tmp_path / "set").glob("*.arrow"))


def test_the_files_are_plain_arrow_for_anybody(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": np.ones((4, 2, 2), np.uint8), "t": ["a", "b", "c", "d"]}])
    with pa.memory_map(str(tmp_path / "set" / "shard-00000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.column("t").to_pylist() == ["a", "b", "c", "d"]
        assert table.column("x").chunk(0).storage.type == pa.list_(pa.uint8(), 4)
        del table


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches were given"),
        ([numbers(0)], "the batches have no records"),
        ([{}], "a batch has no columns"),
        ([{"x": np.ones(3), "y": np.ones(2)}], "column 'y' has 2 rows, column 'x' has 3"),
        ([numbers(2), {"x": np.ones(2)}], "batch 1: column 'x' is dense float64; before it was"),
        ([{"x": ["a"]}, {"x": [1]}], "batch 1: column 'x' is dense int64; before it was string"),
        ([numbers(2), {"z": np.ones(2)}], "batch 1: the columns are z; before they were x"),
        ([{"x": 3}], "column 'x' is a int"),
        ([{"x": "abc"}], "column 'x' is a str"),
        ([{"x": [object()]}], "column 'x' is a list of object"),
        ([{"x": np.ones(2, np.complex64)}], "column 'x' is of type complex64"),
        ([{"x": np.ones((2, 0))}], "its samples are empty"),
        ([{"x": torch.tensor(1.0)}], "its samples are empty"),
        ([{"x": [[1], [[2]]]}], "record 1: a sequence has one dimension"),
        ([{"x": [[1], [1, [2]]]}], "column 'x' does not hold numbers alone"),
        ([{"x": [["a"], ["b"]]}], "column 'x' is of type <U1"),
        ([{"x": ["a", 2]}], "column 'x' does not hold strings alone"),
        ([{"x": [[1]], "x_length": [1]}], "two columns of a batch would be called 'x_length'"),
        (
            [{"x": Sparse(torch.tensor([9]), torch.ones(1), torch.tensor([0, 1]), 5)}],
            "indices run from 9 to 9, outside of width 5",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(batches: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        write_shards(tmp_path / "set", batches)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_size_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows_per_shard is 0"):
        write_shards(tmp_path / "set", [numbers(3)], rows_per_shard=0)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), "no value in record 1 of its batch"),
        (pa.array(["a", None]), "no value in record 1 of its batch"),
        (pa.array([[1], None]), "no value in record 1 of its batch"),
        (pa.array([[1, None]]), "no value in record 1 of its batch"),
        (pa.array([0], pa.timestamp("s")), "is of type timestamp[s]"),
        (pa.array([{"a": 1}]), "is of type struct<a: int64>"),
        (
            pa.array([[(1, 1.0)]], pa.large_list(pa.struct([("index", "i4"), ("value", "f4")]))),
            "its field says no width",
        ),
    ],
)
def test_arrow_columns_that_do_not_fit_are_refused(
    column: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        write_shards(tmp_path / "set", [pa.record_batch({"x": column})])
    assert "column 'x'" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1.5, None]), [1.5, float("nan")]),
        (pa.array([True, False]), [True, False]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[9], [1, 2], []]).slice(1), [[1, 2], [0, 0]]),
        (pa.chunked_array([[1], [2]]), [1, 2]),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.int64(), [2], dim_names=["side"]),
                pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
            ),
            [[1, 2], [3, 4]],
        ),
        (np.array(["a", "b"]), None),
        (pa.array(["a", "b"]).dictionary_encode(), None),
    ],
)
def test_arrow_columns_are_taken_as_they_come(column: Any, expected: Any, tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": column, "n": np.arange(2)}])
    got = ShardSource(tmp_path / "set").gather(torch.arange(2))
    if expected is None:
        assert "x" not in got
    else:
        assert torch.equal(
            torch.nan_to_num(dense(got, "x").double(), -1.0),
            torch.nan_to_num(torch.tensor(expected).double(), -1.0),
        )
