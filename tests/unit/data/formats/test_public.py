"""The strict readers of the files of Criteo and MovieLens."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from echelon.core.config import DataSection
from echelon.core.errors import DataError
from echelon.data import ShardSource, open_table, read, write_shards
from echelon.data.batch import dense


def criteo_line(number: int, label: bool = True) -> str:
    numbers = [str(number) if field else "" for field in range(13)]
    numbers[1] = "-2"
    words = [f"{(number * 7 + field) % 97:08x}" for field in range(26)]
    words[3] = ""
    clicked = [str(int(number % 3 == 0))] if label else []
    return "\t".join([*clicked, *numbers, *words])


def criteo(path: Path, rows: int = 60, label: bool = True) -> Path:
    path.write_text("".join(criteo_line(row, label) + "\n" for row in range(rows)))
    return path


def table(path: Path, format: str, **options: Any) -> Any:
    return pa.Table.from_batches(list(read(path, format, **options)))


def test_criteo_numbers_become_logarithms_and_words_buckets(tmp_path: Path) -> None:
    found = table(criteo(tmp_path / "train.txt"), "criteo", buckets=1000)
    dense = found.column("dense").chunk(0).to_numpy_ndarray()
    ids = found.column("ids").chunk(0).to_numpy_ndarray()
    assert dense.shape == (60, 13)
    assert ids.shape == (60, 26)
    assert np.isnan(dense[:, 0]).all()
    assert (dense[:, 1] == 0).all()
    assert dense[9, 2] == pytest.approx(math.log(10))
    assert (ids[:, 3] == 0).all()
    others = np.delete(ids, 3, axis=1)
    assert others.min() >= 1
    assert others.max() < 1000
    assert found.column("y").to_pylist() == [float(row % 3 == 0) for row in range(60)]


def test_equal_words_share_a_bucket_and_fields_do_not(tmp_path: Path) -> None:
    found = table(criteo(tmp_path / "train.txt", 97 * 2), "criteo")
    ids = found.column("ids").chunk(0).to_numpy_ndarray()
    assert (ids[:97] == ids[97:]).all()
    assert len(np.unique(ids[:97, 0])) == 97
    same_word = ids[0, 7], ids[1, 0]
    assert same_word[0] != same_word[1]


def test_criteo_is_known_by_its_form(tmp_path: Path) -> None:
    criteo(tmp_path / "train.txt", 300)
    splits = open_table(DataSection(path=str(tmp_path / "train.txt")), 0)
    assert splits.shape == (13,)
    assert len(splits.fitted["cardinalities"]) == 26
    batch = splits.train.gather(torch.arange(4))
    assert np.isfinite(dense(batch, "dense").numpy()).all()
    (tmp_path / "day_0.gz").write_bytes(gzip.compress((tmp_path / "train.txt").read_bytes()))
    assert len(open_table(DataSection(path=str(tmp_path / "day_0.gz")), 0).fitted["mean"]) == 13


def test_criteo_test_files_have_no_label(tmp_path: Path) -> None:
    train = open_table(DataSection(path=str(criteo(tmp_path / "train.txt", 100))), 0)
    new = criteo(tmp_path / "test.txt", 10, label=False)
    splits = open_table(DataSection(path=str(new)), 0, fitted=train.fitted)
    assert splits.valid is not None
    assert set(splits.valid.gather(torch.arange(10))) == {"dense", "ids"}


def test_criteo_goes_to_shards_and_trains_from_there(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", read(criteo(tmp_path / "a.txt", 200), "criteo", buckets=50))
    assert len(ShardSource(tmp_path / "set")) == 200
    stored = open_table(DataSection(path=str(tmp_path / "set")), 3)
    direct = open_table(DataSection(path=str(tmp_path / "a.txt"), options={"buckets": 50}), 3)
    assert stored.fitted == {**direct.fitted, "target": "y"}
    rows = torch.arange(20)
    one, other = direct.train.gather(rows), stored.train.gather(rows)
    for name in ("dense", "ids", "y"):
        assert torch.equal(dense(one, name), dense(other, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.rpartition("\t")[0] + "\txyz", "train.txt:3: category 25 is 'xyz'"),
        (lambda line: line.rpartition("\t")[0] + "\t0000000g", "category 25 is '0000000g'"),
        (lambda line: "1\t" + line, "train.txt:3: Expected 40 columns, got 41"),
        (lambda line: line[:2] + "many" + line[2:], "train.txt:3: column 1: "),
    ],
)
def test_a_bad_record_of_criteo_is_named(change: Any, message: str, tmp_path: Path) -> None:
    lines = [criteo_line(row) for row in range(5)]
    lines[2] = change(lines[2])
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as error:
        table(tmp_path / "train.txt", "criteo")
    assert message in str(error.value)


def test_what_is_not_criteo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\t2\t3\n")
    with pytest.raises(DataError, match=r"a.txt:1: 3 fields: a record of Criteo's log has 40"):
        table(tmp_path / "a.txt", "criteo")
    with pytest.raises(DataError, match="option buckets is 1"):
        table(criteo(tmp_path / "b.txt"), "criteo", buckets=1)


RATINGS = [(1, 10, 5.0, 900), (1, 20, 3.0, 910), (2, 10, 4.0, 920), (3, 30, 2.5, 930)]


@pytest.mark.parametrize(
    ("name", "glue", "header"),
    [
        ("ratings.dat", "::", ""),
        ("u.data", "\t", ""),
        ("ratings.csv", ",", "userId,movieId,rating,timestamp\n"),
    ],
)
def test_movielens_in_all_its_forms(name: str, glue: str, header: str, tmp_path: Path) -> None:
    lines = [glue.join(str(cell) for cell in row) for row in RATINGS]
    (tmp_path / name).write_text(header + "\n".join(lines) + "\n")
    found = table(tmp_path / name, "movielens")
    assert found.column("user").to_pylist() == [1, 1, 2, 3]
    assert found.column("movie").to_pylist() == [10, 20, 10, 30]
    assert found.column("label").to_pylist() == [1, 0, 1, 0]
    section = DataSection(path=str(tmp_path / name), held_out=0.25)
    splits = open_table(section, 0)
    assert splits.shape == (1,)
    assert list(splits.fitted["categories"]) == ["user", "movie"]
    assert splits.fitted["numbers"] == ["time"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ratings.dat", "1::2::3\n", "ratings.dat:1: 3 fields: a rating has 4"),
        ("ratings.dat", "1::2::3::4\n1::2::good::4\n", "ratings.dat: after line 0: "),
        ("u.data", "1\t2\t3\n", "u.data:1: 3 fields: a rating has 4"),
        ("ratings.csv", "a,b,c,d\n1,2,3,4\n", "ratings.csv:1: columns a, b, c, d"),
    ],
)
def test_bad_ratings_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        table(tmp_path / name, "movielens")
    assert message in str(error.value)


def test_ratings_are_found_among_the_other_files_of_their_folder(tmp_path: Path) -> None:
    lines = "".join(f"{row % 5},{row % 7},{row % 5 + 1},{row}\n" for row in range(60))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
    (tmp_path / "movies.csv").write_text("movieId,title\n1,Heat\n")
    splits = open_table(DataSection(path=str(tmp_path), format="movielens"), 0)
    assert splits.fitted["cardinalities"] == [6, 8]
