"""Tables of categories and numbers, opened for binary classification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from echelon.core.config import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data import Splits, open_table, read, write_shards


def column(source: BatchSource | None, name: str) -> Tensor:
    assert source is not None
    values = source.gather(torch.arange(len(source)))[name]
    assert isinstance(values, Tensor)
    return values


def table(path: object, **section: Any) -> Splits:
    return open_table(DataSection(path=str(path), **section), 0)


TRAIN = """age,job,city,label
20,cook,Rome,<=50K
30,?,Rome,>50K
?,cook,Oslo,<=50K
70,cook,Rome,>50K
"""
TEST = """age,job,city,label
,clerk,Oslo,>50K
1,?,Bonn,<=50K
"""


@pytest.fixture
def census(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    return tmp_path


def test_words_become_numbers_by_frequency_and_the_unseen_zero(census: Path) -> None:
    splits = table(census)
    assert splits.fitted["categories"] == {"job": ["cook", "?"], "city": ["Rome", "Oslo"]}
    assert splits.fitted["cardinalities"] == [3, 3]
    assert column(splits.train, "ids").tolist() == [[1, 1], [2, 1], [1, 2], [1, 1]]
    assert column(splits.valid, "ids").tolist() == [[0, 2], [2, 0]]
    assert column(splits.train, "ids").dtype == torch.int64


def test_numbers_stay_raw_and_gaps_get_the_training_mean(census: Path) -> None:
    splits = table(census)
    assert (splits.shape, splits.fitted["numbers"]) == ((1,), ["age"])
    assert column(splits.train, "dense").tolist() == [[20], [30], [40], [70]]
    assert column(splits.valid, "dense").tolist() == [[40], [1]]
    assert splits.fitted["mean"] == [40]
    assert splits.fitted["std"] == pytest.approx([np.std([20, 30, 70])])


def test_the_target_is_yes_or_no(census: Path) -> None:
    splits = table(census)
    assert splits.labels == ("<=50K", ">50K")
    y = column(splits.train, "y")
    assert (y.dtype, y.tolist()) == (torch.float32, [0, 1, 0, 1])


def test_whole_numbers_can_be_said_to_be_categories(tmp_path: Path) -> None:
    lines = [f"{row % 3},{row},{row % 2}" for row in range(40)]
    (tmp_path / "a.csv").write_text("shop,sales,label\n" + "\n".join(lines))
    assert table(tmp_path / "a.csv").fitted["numbers"] == ["shop", "sales"]
    splits = table(tmp_path / "a.csv", options={"categories": ["shop"]})
    assert splits.fitted["numbers"] == ["sales"]
    assert splits.fitted["cardinalities"] == [4]
    fitted = json.loads(json.dumps(splits.fitted))
    (tmp_path / "new.csv").write_text("shop,sales\n2,5\n9,5\n")
    new = open_table(DataSection(path=str(tmp_path / "new.csv")), 0, fitted=fitted)
    ids = column(new.valid, "ids")
    assert ids[0] > 0
    assert ids[1] == 0
    with pytest.raises(DataError, match=r"data.options.categories: 'shops' is unknown; did you"):
        table(tmp_path / "a.csv", options={"categories": ["shops"]})


def test_truths_and_dictionaries_are_categories_and_nulls_are_unseen(tmp_path: Path) -> None:
    frame = pa.table(
        {
            "smoker": [True, False, None, True] * 5,
            "city": pa.array(["Rome", "Oslo", "Rome", None] * 5).dictionary_encode(),
            "age": pa.array([1, None, 3, 4] * 5),
            "label": [0, 1, 0, 1] * 5,
        }
    )
    pa.parquet.write_table(frame, tmp_path / "a.parquet")
    splits = table(tmp_path / "a.parquet", valid_path=str(tmp_path / "a.parquet"))
    assert column(splits.train, "ids")[:4].tolist() == [[1, 1], [2, 2], [0, 1], [1, 0]]
    assert column(splits.train, "dense")[1].tolist() == pytest.approx([8 / 3])


def test_the_most_frequent_categories_are_kept(tmp_path: Path) -> None:
    lines = [f"{word},1,{row % 2}" for row, word in enumerate("aaaabbbccd" * 4)]
    (tmp_path / "a.csv").write_text("word,n,label\n" + "\n".join(lines))
    splits = table(tmp_path / "a.csv", vocabulary=2)
    assert splits.fitted["categories"]["word"] == ["a", "b"]


def test_categories_and_moments_are_of_the_training_rows_alone(tmp_path: Path) -> None:
    lines = [f"w{row},{row},{row % 2}" for row in range(100)]
    (tmp_path / "a.csv").write_text("word,n,label\n" + "\n".join(lines))
    splits = table(tmp_path / "a.csv")
    assert splits.fitted["cardinalities"] == [81]
    assert (column(splits.valid, "ids") == 0).all()
    dense = column(splits.train, "dense").double()
    assert splits.fitted["mean"] == pytest.approx([float(dense.mean())])


def test_new_records_are_opened_as_the_old_were(census: Path) -> None:
    fitted = json.loads(json.dumps(table(census).fitted))
    (census / "new.csv").write_text("city,job,age\nOslo,,\n")
    new = open_table(DataSection(path=str(census / "new.csv")), 0, fitted=fitted)
    assert new.valid is not None
    assert set(new.valid.gather(torch.arange(1))) == {"dense", "ids"}
    assert column(new.valid, "ids").tolist() == [[0, 2]]
    assert column(new.valid, "dense").tolist() == [[40]]


def test_a_table_of_categories_alone_has_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("word,label\n" + "x,0\ny,1\n" * 5)
    splits = table(tmp_path / "a.csv")
    assert splits.shape == (0,)
    assert column(splits.train, "dense").shape == (8, 0)
    (tmp_path / "b.csv").write_text("n,label\n" + "1,0\n2,1\n" * 5)
    assert column(table(tmp_path / "b.csv").train, "ids").shape == (8, 0)


def ready(rows: int = 50, ids: Any = None) -> dict[str, Any]:
    random = np.random.default_rng(0)
    dense = random.standard_normal((rows, 2)).astype(np.float32)
    dense[2, 1] = np.nan
    ids = np.stack([np.arange(rows) % 5, np.arange(rows) % 7], 1) if ids is None else ids
    return {"dense": dense, "ids": ids, "label": np.arange(rows) % 2}


@pytest.mark.parametrize("stored", [True, False])
def test_vectors_that_are_ready_are_taken_as_they_are(stored: bool, tmp_path: Path) -> None:
    path = tmp_path / "train"
    if stored:
        write_shards(path, [ready()], rows_per_shard=20)
    else:
        path = tmp_path / "train.npz"
        np.savez(path, **ready())
    splits = table(path)
    assert splits.fitted["cardinalities"] == [5, 7]
    dense = column(splits.train, "dense")
    assert not dense.isnan().any()
    new = ready(3, np.array([[4, 6], [5, 1], [0, -1]]))
    del new["label"]
    np.savez(tmp_path / "new.npz", **new)
    again = open_table(
        DataSection(path=str(tmp_path / "new.npz")), 0, fitted=json.loads(json.dumps(splits.fitted))
    )
    assert column(again.valid, "ids").tolist() == [[4, 6], [0, 1], [0, 0]]


def test_ready_vectors_of_another_width_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ready())
    fitted = table(tmp_path / "a.npz").fitted
    np.savez(tmp_path / "b.npz", **{**ready(), "ids": np.zeros((50, 3), int)})
    with pytest.raises(DataError, match=r"2 numbers and 3 ids per record; .* trained on 2 and 2"):
        open_table(DataSection(path=str(tmp_path / "b.npz")), 0, fitted=fitted)
    np.savez(tmp_path / "c.npz", **{**ready(), "ids": np.full((50, 2), -1)})
    with pytest.raises(DataError, match="`ids` must hold a row of whole numbers from 0 on"):
        table(tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,label\nx,0\ny,1\nz,2\n", "target 'label' has 3 classes: here it is yes or no"),
        ("a,b,label\nx,,0\ny,,1\n", "column 'b' is empty: leave it out with data.columns"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as error:
        table(tmp_path / "a.csv")
    assert message in str(error.value)


def test_columns_that_changed_their_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("shop,n,label\n" + "1,2,0\n2,3,1\n" * 5)
    fitted = table(tmp_path / "a.csv", options={"categories": ["shop"]}).fitted
    (tmp_path / "new.csv").write_text("shop,n\nRome,2\n")
    with pytest.raises(DataError, match=r"'shop' is of type string; in training it was int64"):
        open_table(DataSection(path=str(tmp_path / "new.csv")), 0, fitted=fitted)
    (tmp_path / "new.jsonl").write_text('{"shop":1,"n":[1,2]}\n')
    with pytest.raises(DataError, match="column 'n' has several numbers per record"):
        open_table(DataSection(path=str(tmp_path / "new.jsonl")), 0, fitted=fitted)


def test_fields_are_read_from_tsv_and_from_shards_alike(tmp_path: Path) -> None:
    lines = "".join(f"w{row % 4}\t{row}\t{row % 2}\n" for row in range(40))
    (tmp_path / "a.tsv").write_text("word\tn\tlabel\n" + lines)
    write_shards(tmp_path / "set", read(tmp_path / "a.tsv"))
    one, other = table(tmp_path / "a.tsv"), table(tmp_path / "set")
    assert one.fitted == other.fitted
    assert torch.equal(column(one.train, "ids"), column(other.train, "ids"))
