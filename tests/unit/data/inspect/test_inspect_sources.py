"""Finding the parts at a path, and reporting what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from echelon.core.errors import DataError
from echelon.data.inspect import inspect


def found(path: Path, **settings: Any) -> dict[str, tuple[str, int]]:
    return {part.name: (part.format, part.records) for part in inspect(path, **settings).parts}


def test_files_of_a_folder_are_parts_and_numbered_ones_are_one(tmp_path: Path) -> None:
    for name, rows in (("test", 3), ("train-1", 4), ("train-2", 5), ("more", 6)):
        (tmp_path / f"{name}.csv").write_text("a\n" + "1\n" * rows)
    for name in ("README.md", "prepared.json", ".hidden.csv", "quarantine.jsonl"):
        (tmp_path / name).write_text("not data")
    assert found(tmp_path) == {
        "train-1.csv": ("csv", 9),
        "test.csv": ("csv", 3),
        "more.csv": ("csv", 6),
    }


def test_a_folder_with_one_data_set_is_one_part(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.tsv.gz", "wt") as file:
        file.write("a\tb\n1\t2\n")
    assert found(tmp_path) == {"": ("tsv", 1)}


def test_folders_named_as_splits_are_parts(tmp_path: Path) -> None:
    for split in ("test", "train"):
        for kind in ("cat", "dog"):
            folder = tmp_path / split / kind
            folder.mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "1.png")
    assert found(tmp_path) == {"train": ("images", 2), "test": ("images", 2)}
    (part, _) = inspect(tmp_path).parts
    assert part.balance == {"cat": 1, "dog": 1}


def test_documents_in_class_folders_are_one_part(tmp_path: Path) -> None:
    for kind in ("neg", "pos"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1.txt").write_text("a text\nof two lines")
    assert found(tmp_path) == {"": ("text", 2)}


def test_arrays_named_by_split_are_parts(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((5, 2)), "y_train": np.zeros(5), "x_test": np.zeros((2, 2))}
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    assert found(tmp_path / "x.npz") == {"train": ("numpy", 5), "test": ("numpy", 2)}
    assert found(tmp_path / "x.npz", part="train") == {"": ("numpy", 5)}


def test_labels_beside_images_belong_to_them(tmp_path: Path) -> None:
    head = bytes([0, 0, 8])
    images = head + bytes([3]) + np.array([2, 2, 2], ">u4").tobytes() + bytes(8)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(
        head + bytes([1]) + np.array([2], ">u4").tobytes() + bytes([7, 8])
    )
    (part,) = inspect(tmp_path).parts
    assert (part.records, part.files, part.balance) == (2, 2, {7: 1, 8: 1})


def test_the_format_and_its_options_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("1\t2\n3\t4\n")
    (part,) = inspect(tmp_path / "x.log", "tsv", header=False).parts
    assert [column.name for column in part.columns] == ["column0", "column1"]
    with pytest.raises(DataError, match="its format cannot be told from its name"):
        inspect(tmp_path / "x.log")
    with pytest.raises(DataError, match="option of format tsv 'hedder' is unknown"):
        inspect(tmp_path / "x.log", "tsv", hedder=False)


def test_a_column_that_only_some_files_have_is_missing_in_the_others(tmp_path: Path) -> None:
    (tmp_path / "x1.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "x2.jsonl").write_text('{"a": null, "b": "x"}\n')
    (tmp_path / "x3.jsonl").write_text('{"a": 2.5}\n{"b": "y"}\n')
    (part,) = inspect(tmp_path).parts
    a, b = part.columns
    assert (part.records, a.missing, b.missing) == (5, 2, 3)
    assert a.counts == {1: 1, 2: 1, 2.5: 1}
    assert b.counts == {"x": 1, "y": 1}


def test_what_was_all_missing_takes_whatever_comes(tmp_path: Path) -> None:
    for number, values in enumerate(([None, None], ["x", None], [None])):
        table = pa.table({"a": pa.array(values)})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    (part,) = inspect(tmp_path).parts
    (a,) = part.columns
    assert (a.kind, a.records, a.missing) == ("text", 5, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], ["x"]),
        ([True], [2]),
        ([[1.0]], ["x"]),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.array([[1]], pa.list_(pa.int64(), 1))),
    ],
)
def test_files_of_one_part_that_contradict_each_other_are_refused(
    first: Any, second: Any, tmp_path: Path
) -> None:
    parquet.write_table(pa.table({"a": first}), tmp_path / "x1.parquet")
    parquet.write_table(pa.table({"a": second}), tmp_path / "x2.parquet")
    with pytest.raises(DataError, match=r"x2\.parquet: column 'a' is of type .*; before it was"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", b"", "x.csv: empty"),
        ("x.csv", b"a,b\n", "it has a header but no records"),
        ("x.csv", b"a,b\n1,\xff\n", "x.csv:2: column 'b' is not UTF-8"),
        ("x.csv.gz", gzip.compress(b"a\n" + b"1\n" * 9999, mtime=0)[:30], "damaged or truncated"),
        ("x.jsonl", b"{}\n{}\n", "its records have no columns"),
        ("x.parquet", b"PAR1", "not a whole Parquet file"),
        ("x.npy", b"\x93NUMPY", "not a whole numpy file"),
    ],
)
def test_broken_files_are_refused_in_one_line(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        inspect(tmp_path / name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_to_look_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such file or folder"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="its format cannot be told from its content"):
        inspect(tmp_path / "empty")
    parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: empty: it has no records"):
        inspect(tmp_path / "x.parquet")


def test_a_fault_within_a_column_ends_the_look_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.data.inspect import columns

    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"a": n}) for n in range(100)))

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(columns.NumberLook, "_take", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        inspect(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "records", "said"),
    [
        ("x.csv", b"a,b\n1,2\n3\n4,5\n", 1, "x.csv:3: 1 cell, but there are 2 columns"),
        ("x.csv", b"a,b\n1,x\n3,\xff\n4,y\n", 1, "x.csv:3: column 'b' is not UTF-8"),
        ("x.tsv", b"a\tb\n1\t2\n3\t4\t5\n6\t7\n", 1, "x.tsv:3: 3 cells, but there are 2"),
        ("x.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', 1, "x.jsonl:2: not JSON"),
        ("x.csv.gz", gzip.compress(b"a\n1\n2\n", 0, mtime=0)[:-8], 0, "x.csv.gz:4: truncated"),
    ],
)
def test_the_rest_of_a_file_is_looked_at_and_what_is_bad_is_told(
    name: str, content: bytes, records: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    (part,) = inspect(tmp_path / name).parts
    assert part.records == 2
    assert part.unread.records == records
    (fault,) = part.unread.faults
    assert said in fault
    assert part.as_data()["unread"] == {"records": records, "faults": [fault]}


def test_of_many_faults_the_first_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n" + "3\n" * 9)
    (part,) = inspect(tmp_path / "x.csv").parts
    assert part.unread.lines()[0] == "9 records cannot be read"
    assert len(part.unread.faults) == 5
    assert part.unread.lines()[-1] == "and 4 more"


def test_a_label_that_is_not_there_is_told_for_bad_files_too(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match="label column"):
        inspect(tmp_path / "x.csv", label="c")


def test_a_part_that_cannot_be_read_is_told_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,b\n")
    (tmp_path / "b.csv").write_bytes(b"")
    first, second = inspect(tmp_path).parts
    assert (first.records, first.unread.faults) == (1, ())
    assert [column.type for column in first.columns] == ["int64", "string"]
    assert (second.name, second.records, second.columns) == ("b.csv", 0, ())
    assert second.unread.lines() == ["something cannot be read", f"{tmp_path}/b.csv: empty"]
    with pytest.raises(DataError, match="label column"):
        inspect(tmp_path, label="z")
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        inspect(tmp_path)
