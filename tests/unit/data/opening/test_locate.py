"""Which files are the training part and which are held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.core.errors import DataError
from echelon.data import write_shards
from echelon.data.opening.locate import find_parts


def touch(folder: Path, *names: str) -> str:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(folder)


@pytest.mark.parametrize(
    ("names", "train", "valid"),
    [
        (["train.csv.gz", "test.csv.gz"], "train.csv.gz", "test.csv.gz"),
        (["train.tsv", "dev.tsv", "test.tsv"], "train.tsv", "dev.tsv"),
        (["train.tsv", "valid.tsv", "dev.tsv"], "train.tsv", "valid.tsv"),
        (["sst2-train.tsv", "sst2-test.tsv", "mr.tsv"], "sst2-train.tsv", "sst2-test.tsv"),
        (
            [
                f"{p}-{k}-idx{n}-ubyte"
                for p in ("train", "t10k")
                for k, n in (("images", 3), ("labels", 1))
            ],
            "train-images-idx3-ubyte",
            "t10k-images-idx3-ubyte",
        ),
        (["housing.csv", "README.md", "notes.docx", "labels.txt"], "housing.csv", None),
        (["training_set.jsonl"], "training_set.jsonl", None),
        (["train/cat/1.png", "test/cat/1.png"], "train", "test"),
        (["train/a.csv", "val/a.csv"], "train/a.csv", "val/a.csv"),
        (["train/a.csv", "val/a.csv", ".git/config", "notes/x.txt"], "train/a.csv", "val/a.csv"),
        (["cat/1.png", "dog/1.png"], "", None),
        (["bus/1.png", "train/1.png"], "", None),
        (["one.txt", "two.txt"], "", None),
    ],
)
def test_names_say_which_part_is_which(
    names: list[str], train: str, valid: str | None, tmp_path: Path
) -> None:
    parts = find_parts(touch(tmp_path, *names))
    assert parts.train.paths == (tmp_path / train,)
    assert (parts.valid.paths[0] if parts.valid else None) == (valid and tmp_path / valid)


def test_numbered_files_are_pieces_of_one_set(tmp_path: Path) -> None:
    folder = touch(tmp_path, "train-00.parquet", "train-01.parquet", "test-00.parquet")
    parts = find_parts(folder)
    assert [path.name for path in parts.train.paths] == ["train-00.parquet", "train-01.parquet"]
    assert parts.train.format == "parquet"
    assert parts.train.where.endswith("train-00.parquet and 1 more")


def test_a_held_out_path_of_its_own_wins(tmp_path: Path) -> None:
    touch(tmp_path, "train.csv", "test.csv", "other.csv")
    parts = find_parts(str(tmp_path), str(tmp_path / "other.csv"))
    assert parts.valid is not None
    assert parts.valid.paths == (tmp_path / "other.csv",)


def test_an_npz_may_hold_both_parts(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=[1], y_train=[1], x_test=[1], y_test=[1])
    parts = find_parts(str(tmp_path))
    assert parts.train.options == {"part": "train"}
    assert parts.valid is not None
    assert parts.valid.options == {"part": "test"}
    np.savez(tmp_path / "a.npz", x=[1], in_train=[1])
    assert find_parts(str(tmp_path)).valid is None


def test_shards_lie_in_one_folder_or_in_two(tmp_path: Path) -> None:
    for name in ("one", "two/train", "two/test"):
        write_shards(tmp_path / name, [{"x": np.arange(2)}])
    assert find_parts(str(tmp_path / "one")).train.format == "shards"
    two = find_parts(str(tmp_path / "two"))
    assert two.valid is not None
    assert (two.train.format, two.valid.format) == ("shards", "shards")


def test_a_stated_format_takes_files_of_any_name(tmp_path: Path) -> None:
    folder = touch(tmp_path, "train.dat", "test.dat")
    parts = find_parts(folder, format="csv")
    assert (parts.train.format, parts.train.paths[0].name) == ("csv", "train.dat")
    touch(tmp_path, "other.csv")
    assert find_parts(folder, format="csv").train.paths == (tmp_path / "other.csv",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mr.tsv", "subj.tsv"], "holds more than one data set; set path to one of: mr.tsv, subj"),
        (["sst2-train.tsv", "trec-train.tsv"], "more than one data set; set path to one of: sst2"),
        (["wiki.valid.txt", "wiki.test.txt"], "has no training part; set path"),
        (["notes.docx"], "its format cannot be told from its content"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(
    names: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        find_parts(touch(tmp_path, *names))
    assert message in str(error.value)


def test_new_data_may_be_a_held_out_part_alone(tmp_path: Path) -> None:
    folder = touch(tmp_path, "test.csv")
    assert find_parts(folder, new=True).train.paths == (tmp_path / "test.csv",)
    touch(tmp_path, "train.csv")
    parts = find_parts(folder, new=True)
    assert (parts.train.paths, parts.valid) == ((tmp_path / "test.csv",), None)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        find_parts(str(tmp_path / "nowhere"))
    touch(tmp_path, "a.csv")
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        find_parts(str(tmp_path / "a.csv"), str(tmp_path / "nowhere"))
    (tmp_path / "b.npz").write_text("no zip")
    with pytest.raises(DataError, match=r"b.npz: not a whole .npz file"):
        find_parts(str(tmp_path / "b.npz"))
