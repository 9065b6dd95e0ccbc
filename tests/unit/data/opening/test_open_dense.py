"""Vectors and images, opened for classification and regression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from echelon.core.config import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data import Splits, open_dense, read, split_rows, write_shards


def column(source: BatchSource | None, name: str) -> Tensor:
    assert source is not None
    values = source.gather(torch.arange(len(source)))[name]
    assert isinstance(values, Tensor)
    return values


def classes(path: object, **section: Any) -> Splits:
    return open_dense(DataSection(path=str(path), **section), 0, target="class")


def csv(path: Path, rows: int = 100, header: str = "a,b,label") -> Path:
    lines = [f"{row},{row % 7 * 0.5},{row % 4 == 0:d}" for row in range(rows)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "shape", "labels"),
    [
        ("digits", (1, 8, 8), tuple("0123456789")),
        ("breast_cancer", (30,), ("malignant", "benign")),
        ("wine", (13,), ("class_0", "class_1", "class_2")),
    ],
)
def test_the_shipped_sets(name: str, shape: tuple[int, ...], labels: tuple[str, ...]) -> None:
    splits = open_dense(DataSection(name=name), 0, target="class")
    assert (splits.shape, splits.labels) == (shape, labels)
    assert splits.about["name"] == name
    x, y = column(splits.train, "x"), column(splits.train, "y")
    assert x.shape[1:] == shape
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    mean = x.double().mean(0) if len(shape) == 1 else x.double().mean().view(1)
    assert splits.fitted["mean"] == pytest.approx(mean.tolist())
    std = x.double().std(0, correction=0) if len(shape) == 1 else x.double().std().view(1)
    assert splits.fitted["std"] == pytest.approx(std.tolist(), rel=1e-4)


def test_a_shipped_set_to_give_numbers() -> None:
    splits = open_dense(DataSection(name="diabetes"), 0, target="number")
    assert (splits.labels, splits.shape) == ((), (10,))
    assert column(splits.train, "y").dtype == torch.float32


def test_the_split_is_seeded_stratified_and_complete(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", 400)
    first, again = classes(path), classes(path)
    assert torch.equal(column(first.valid, "x"), column(again.valid, "x"))
    other = open_dense(DataSection(path=str(path)), 1, target="class")
    assert not torch.equal(column(first.valid, "x"), column(other.valid, "x"))
    assert column(first.train, "y").sum() == 80
    assert column(first.valid, "y").sum() == 20
    everything = torch.cat([column(first.train, "x"), column(first.valid, "x")])[:, 0]
    assert sorted(everything.tolist()) == list(range(400))
    assert len(classes(path, held_out=0.5).train) == 200


def test_every_class_gives_its_part_even_if_rare() -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    kept, held = split_rows(1000, 0.2, 3, labels)
    assert np.bincount(labels[held.numpy()]).tolist() == [180, 18, 2]
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(1000))
    assert len(split_rows(2, 0.01, 0)[1]) == 1
    assert len(split_rows(3, 0.99, 0)[0]) == 1
    with pytest.raises(DataError, match="too few to hold some out"):
        split_rows(1, 0.5, 0)


def test_moments_are_those_of_the_training_part_alone(tmp_path: Path) -> None:
    splits = classes(csv(tmp_path / "a.csv"))
    x = column(splits.train, "x").double()
    assert splits.fitted["mean"] == pytest.approx(x.mean(0).tolist())
    assert splits.fitted["std"] == pytest.approx(x.std(0, correction=0).tolist())


def test_a_feature_that_never_changes_can_still_be_divided_by(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,y\n" + "0.1,1,0\n0.1,2,1\n" * 10)
    assert classes(tmp_path / "a.csv").fitted["std"][0] == 1.0


def test_missing_numbers_get_the_training_mean(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,y\n1,5,0\n?,6,1\n3,,0\n8,7,1\n")
    (tmp_path / "test.csv").write_text("a,b,y\n,1,1\n")
    splits = classes(tmp_path)
    assert column(splits.train, "x").tolist() == [[1, 5], [4, 6], [3, 6], [8, 7]]
    assert column(splits.valid, "x").tolist() == [[4, 1]]
    json.dumps(splits.fitted, allow_nan=False)


def test_images_stay_bytes_with_channels_first(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2)
    splits = classes(tmp_path / "a.npz")
    assert splits.shape == (3, 6, 5)
    got = column(splits.train, "x")
    assert got.dtype == torch.uint8
    means = got.double().mean((0, 2, 3))
    assert splits.fitted["mean"] == pytest.approx(means.tolist())
    np.savez(tmp_path / "b.npz", x=x[..., 0], y=np.arange(20) % 2)
    assert classes(tmp_path / "b.npz").shape == (1, 6, 5)
    np.savez(tmp_path / "c.npz", x=x[:, 0, :, 0], y=np.arange(20) % 2)
    assert column(classes(tmp_path / "c.npz").train, "x").dtype == torch.float32


def test_an_image_folder_gives_its_class_names(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for copy in range(2):
                image = Image.fromarray(np.full((4, 4), 100 * number, np.uint8))
                image.save(tmp_path / part / name / f"{copy}.png")
    splits = classes(tmp_path)
    assert (splits.labels, splits.shape) == (("cat", "dog"), (1, 4, 4))
    assert column(splits.valid, "y").tolist() == [0, 0, 1, 1]
    scaled = classes(tmp_path, options={"size": 2})
    assert scaled.shape == (1, 2, 2)


def test_sheets_of_tiles_are_opened_by_their_option(tmp_path: Path) -> None:
    for part in ("train", "test"):
        sheet = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
        Image.fromarray(sheet).save(tmp_path / f"{part}.png")
    np.savez(tmp_path / "labels.npz", y_train=np.arange(6) % 3, y_test=np.arange(6) % 3)
    splits = classes(tmp_path, format="images", options={"tile": 2})
    assert (splits.shape, len(splits.train)) == ((3, 2, 2), 6)
    assert column(splits.valid, "y").tolist() == [0, 1, 2, 0, 1, 2]


def test_a_file_without_names_has_its_label_first(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t0.5\t2\n0\t0.7\t3\n" * 5)
    splits = classes(tmp_path / "a.tsv")
    assert splits.fitted["target"] == "column0"
    assert splits.fitted["features"] == ["column1", "column2"]


def test_label_names_come_from_a_file_beside(tmp_path: Path) -> None:
    csv(tmp_path / "a.csv")
    (tmp_path / "labels.txt").write_text("no\nyes\n")
    assert classes(tmp_path / "a.csv").labels == ("no", "yes")
    (tmp_path / "labels.txt").write_text("no\nyes\nperhaps\n")
    assert classes(tmp_path / "a.csv").labels == ("0", "1")


def test_truths_are_numbers_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\ntrue,0\nfalse,1\n")
    splits = classes(tmp_path / "a.csv", valid_path=str(tmp_path / "a.csv"))
    assert column(splits.train, "x").tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([">50K", "<=50K"], ("<=50K", ">50K")),
        ([1.0, 0.0], ("0", "1")),
        ([7, -1], ("-1", "7")),
        ([True, False], ("False", "True")),
        (pa.array(["yes", "no"] * 10).dictionary_encode(), ("no", "yes")),
    ],
)
def test_classes_may_be_words_numbers_or_truths(
    values: Any, labels: tuple[str, ...], tmp_path: Path
) -> None:
    table = pa.table(
        {"a": np.arange(20.0), "label": values * 10 if isinstance(values, list) else values}
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    splits = classes(tmp_path / "a.parquet")
    assert splits.labels == labels
    assert column(splits.train, "y").sum() == 8
    fitted = json.loads(json.dumps(splits.fitted))
    again = open_dense(
        DataSection(path=str(tmp_path / "a.parquet")), 0, target="class", fitted=fitted
    )
    assert column(again.valid, "y").tolist() == [1, 0] * 10


def test_vectors_in_jsonl(tmp_path: Path) -> None:
    lines = [json.dumps({"x": [row, 2 * row], "y": row % 2}) for row in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    splits = classes(tmp_path / "a.jsonl")
    assert splits.shape == (2,)
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, '{"x":[1],"y":0}']))
    with pytest.raises(DataError, match="'x' has 2 numbers in record 0, but 1 in record 10"):
        classes(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"x":["a"],"y":0}\n{"x":["b"],"y":1}\n')
    with pytest.raises(DataError, match=r"column 'x' is of type .*: not numbers"):
        classes(tmp_path / "c.jsonl")


def test_new_data_is_opened_as_the_old_was(tmp_path: Path) -> None:
    old = classes(csv(tmp_path / "old.csv"))
    (tmp_path / "new.csv").write_text("b,extra,a,label\n1,x,2,1\n3,y,,0\n")
    fitted = json.loads(json.dumps(old.fitted))
    new = open_dense(DataSection(path=str(tmp_path / "new.csv")), 0, target="class", fitted=fitted)
    assert column(new.valid, "x")[0].tolist() == [2, 1]
    assert column(new.valid, "x")[1].tolist() == pytest.approx([old.fitted["mean"][0], 3])
    assert column(new.valid, "y").tolist() == [1, 0]
    assert new.fitted == old.fitted


def test_new_data_needs_no_target(tmp_path: Path) -> None:
    old = classes(csv(tmp_path / "old.csv"))
    for content in ("a,b\n2,1\n", "a,b,label\n2,1,\n"):
        (tmp_path / "new.csv").write_text(content)
        new = open_dense(
            DataSection(path=str(tmp_path / "new.csv")), 0, target="class", fitted=old.fitted
        )
        assert new.valid is not None
        assert list(new.valid.gather(torch.arange(1))) == ["x"]


def test_of_new_data_in_two_parts_the_held_out_one_is_taken(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", 40)
    csv(tmp_path / "test.csv", 8)
    splits = classes(tmp_path)
    section = DataSection(path=str(tmp_path))
    assert len(open_dense(section, 0, target="class", fitted=splits.fitted).train) == 8


def test_new_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    old = classes(csv(tmp_path / "old.csv"))

    def new(content: str, **section: Any) -> None:
        (tmp_path / "new.csv").write_text(content)
        section = {"path": str(tmp_path / "new.csv"), **section}
        open_dense(DataSection(**section), 0, target="class", fitted=old.fitted)

    with pytest.raises(DataError, match=r"new.csv: column 'a' is unknown"):
        new("b,label\n1,0\n")
    with pytest.raises(DataError, match=r"record 1: class 9 of 'label' was not seen in training"):
        new("a,b,label\n1,2,0\n1,2,9\n")
    with pytest.raises(DataError, match=r"data.valid_path is for training"):
        new("a,b,label\n1,2,0\n", valid_path=str(tmp_path / "old.csv"))
    old.fitted["kind"] = "text"
    with pytest.raises(DataError, match="trained on text data; here dense data is opened"):
        new("a,b,label\n1,2,0\n")


def test_parts_of_another_shape_are_refused(tmp_path: Path) -> None:
    x, y = np.ones((4, 6)), np.arange(4) % 2
    np.savez(tmp_path / "a.npz", x_train=x[:, 1:], y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match=r"shape \[6\]; the model is trained on \[5\]"):
        classes(tmp_path / "a.npz")


@pytest.mark.parametrize("split", [True, False])
def test_shards_are_opened_without_reading_them_in(split: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (60, 1, 4, 4), np.uint8)
    data = {"x": x, "label": ["even" if row % 2 else "odd" for row in range(60)]}
    write_shards(tmp_path / "set" / "train", [data], rows_per_shard=13)
    if not split:
        write_shards(tmp_path / "set" / "test", [data])
    splits = classes(tmp_path / "set" / "train" if split else tmp_path / "set")
    assert len(splits.train) == (48 if split else 60)
    assert splits.labels == ("even", "odd")
    got = column(splits.train, "x").double()
    assert splits.fitted["mean"] == pytest.approx([float(got.mean())])
    assert splits.fitted["std"] == pytest.approx([float(got.std(correction=0))])
    assert type(getattr(splits.train, "source", splits.train)).__name__ == "PreparedSource"


def test_columns_of_shards_stand_side_by_side(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", read(csv(tmp_path / "a.csv"), types={"a": "float64"}))
    stored, direct = classes(tmp_path / "set"), classes(tmp_path / "a.csv")
    assert stored.fitted == direct.fitted
    assert torch.equal(column(stored.valid, "x"), column(direct.valid, "x"))


def test_missing_numbers_in_shards_get_the_mean_too(tmp_path: Path) -> None:
    x = np.array([[1, np.nan], [3, 4], [np.nan, 8], [5, 6]], np.float32)
    for part in ("train", "test"):
        write_shards(tmp_path / part, [{"x": x, "y": np.arange(4) % 2}])
    splits = classes(tmp_path)
    assert splits.fitted["mean"] == [3, 6]
    assert column(splits.train, "x").tolist() == [[1, 6], [3, 4], [3, 8], [5, 6]]


def test_images_in_shards_are_turned_as_others_are(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, 6, 5, 3), np.uint8)
    for part in ("train", "test"):
        write_shards(tmp_path / part, [{"x": x, "y": np.arange(8) % 2}])
    splits = classes(tmp_path)
    assert splits.shape == (3, 6, 5)
    assert splits.fitted["mean"] == pytest.approx(x.mean((0, 1, 2)).tolist())


def test_a_feature_of_nothing_but_gaps_becomes_zero(tmp_path: Path) -> None:
    x = np.array([[1, np.nan], [3, np.nan]], np.float32)
    for part in ("train", "test"):
        write_shards(tmp_path / part, [{"x": x, "y": np.arange(2)}])
    splits = classes(tmp_path)
    assert (splits.fitted["mean"], splits.fitted["std"]) == ([2, 0], [1, 1])
    assert column(splits.train, "x").tolist() == [[1, 0], [3, 0]]


@pytest.mark.parametrize(
    ("content", "section", "message"),
    [
        ("a,b\n1,2\n", {}, "no column is called label, target, y, class; set data.target"),
        ("a,label\n1,2\n", {"target": "lable"}, "target column 'lable' is unknown; did you mean"),
        ("a,label\n1,0\n2,1\n", {"columns": ["b"]}, "data.columns: 'b' is unknown"),
        ("a,label\nx,0\ny,1\n", {}, "column 'a' is text, not numbers: leave it out"),
        ("a,b,label\n,1,0\n,2,1\n", {}, "column 'a' is empty: leave it out"),
        ("label\n0\n1\n", {}, "has no columns beside label"),
        ("a,label\n1,5\n2,5\n", {}, "target 'label' has only one class: 5"),
        ("a,label\n1,0\n2,?\n3,1\n", {}, "record 1: target 'label' is missing"),
        ("a,label\n1,0\n2,1.5\n", {}, "record 1: target 'label' is 1.5: classes are whole"),
        ("a,label\n1,2020-01-01\n2,2020-01-02\n", {}, "is of type date32[day]: not classes"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    content: str, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as error:
        classes(tmp_path / "a.csv", **section)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,y\n1,2.5\n2,?\n", "record 1: target 'y' is nan, not a number"),
        ("a,y\n1,low\n2,high\n", "column 'y' is of type string: not numbers"),
    ],
)
def test_a_target_that_is_no_number_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as error:
        open_dense(DataSection(path=str(tmp_path / "a.csv")), 0, target="number")
    assert message in str(error.value)


def test_too_many_classes_and_odd_shapes_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(20_000.0), y=np.arange(20_000))
    with pytest.raises(DataError, match="has 20000 different values: at most 10000 classes"):
        classes(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.ones((4, 3)), z=np.ones((4, 2)), y=np.arange(4) % 2)
    with pytest.raises(DataError, match=r"'x' has shape \[3\] and cannot stand beside others"):
        classes(tmp_path / "b.npz")
    assert classes(tmp_path / "b.npz", columns=["z"]).shape == (2,)
    np.savez(tmp_path / "c.npz", x=np.ones(4), y=np.ones((4, 2)))
    with pytest.raises(DataError, match="target 'y' has several numbers per record"):
        open_dense(DataSection(path=str(tmp_path / "c.npz")), 0, target="number")


def test_sections_that_say_nothing_useful_are_refused() -> None:
    with pytest.raises(DataError, match=r"data.name 'digit' is unknown; did you mean 'digits'"):
        open_dense(DataSection(name="digit"), 0, target="class")
    with pytest.raises(DataError, match="takes no options"):
        open_dense(DataSection(name="digits", options={"rows": 5}), 0, target="class")
    with pytest.raises(DataError, match=r"there is no data to read: set data.path"):
        open_dense(DataSection(), 0, target="class")


def test_pieces_of_one_set_are_read_one_after_the_other(tmp_path: Path) -> None:
    for number, rows in enumerate((30, 20)):
        csv(tmp_path / f"part-{number}.csv", rows)
    splits = classes(tmp_path)
    assert len(splits.train) + len(column(splits.valid, "x")) == 50
    (tmp_path / "part-2.csv").write_text("a,b,label\nx,y,z\n")
    with pytest.raises(DataError, match=r"part-0.csv and 2 more: its files differ"):
        classes(tmp_path)
