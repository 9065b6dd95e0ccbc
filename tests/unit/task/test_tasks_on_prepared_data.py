"""Tasks on prepared data, and on raw records that are encoded like the training data."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from echelon.core.config import job_from
from echelon.core.errors import ConfigError, DataError
from echelon.core.interfaces import Task
from echelon.core.types import Sparse
from echelon.data.opening.prepared import target_made_of
from echelon.data.prepare import prepare
from echelon.task.loading import load_task
from echelon.task.loading import prepare as made_ready

ROWS = [
    (f"{2.0 + n % 7}", f"{n % 5}", ("red", "green", "blue")[n % 3], ("no", "yes")[n % 5 > 2])
    for n in range(60)
]
FEATURES = [
    {"kind": "standardise", "from": ["width", "height"], "to": "x"},
    {"kind": "one_hot", "from": "colour", "to": "colours", "form": "sparse"},
    {"kind": "classes", "from": "bought", "to": "y"},
]

CLASSES = {"kind": "classes", "from": "label", "to": "y"}


def written(path: Path, rows: Sequence[tuple[str, ...]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([("width", "height", "colour", "bought"), *rows])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("prepared")
    raw = written(home / "raw.csv", ROWS)
    recipe = {
        "read": [{"path": str(raw)}],
        "split": {"by": "stratified", "column": "bought", "train": 0.7, "valid": 0.3},
        "balance": {"column": "bought", "how": "weight"},
        "features": FEATURES,
        "write": {"folder": str(home / "done"), "shards": 2},
    }
    prepare(recipe, workers=1)
    return home / "done"


def task(path: Path, name: str = "classify", fitted: Any = None, **data: Any) -> Task:
    job = job_from({"task": name, "data": {"path": str(path), **data}})
    return made_ready(load_task(job, fitted))


def everything(source: Any) -> dict[str, Any]:
    found: dict[str, Any] = source.gather(torch.arange(len(source)))
    return found


def test_shards_are_read_as_the_recipe_made_them(folder: Path) -> None:
    found = task(folder)
    train, valid = everything(found.train), everything(found.valid)
    assert sorted(train) == ["weight", "x", "y"]
    assert sorted(valid) == ["x", "y"], "weights are for training"
    assert found.labels == ("no", "yes")
    torch.testing.assert_close(train["x"].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert len(train["y"]) + len(valid["y"]) == len(ROWS)
    assert found.model()(train["x"]).shape == (len(train["y"]), 2)


def test_a_single_number_is_a_vector_of_one(tmp_path: Path) -> None:
    raw = written(tmp_path / "raw.csv", ROWS)
    features = [{"kind": "standardise", "from": "width", "to": "x"}, FEATURES[2]]
    recipe = {"read": str(raw), "features": features, "write": {"folder": str(tmp_path / "out")}}
    prepare(recipe, workers=1)
    found = task(tmp_path / "out")
    x = everything(found.train)["x"]
    assert x.shape[1:] == (1,)
    assert found.model()(x).shape == (len(x), 2)
    new = task(raw, fitted=dict(found.fitted))
    assert everything(new.valid)["x"].shape == (len(ROWS), 1)


def test_sparse_rows_are_never_made_dense(folder: Path) -> None:
    found = task(folder, columns=["colours"])
    x = everything(found.train)["x"]
    assert isinstance(x, Sparse)
    assert x.width == 3
    assert found.model()(x).shape == (len(found.train), 2)


def test_raw_records_are_encoded_as_the_training_data_was(folder: Path, tmp_path: Path) -> None:
    fitted = dict(task(folder).fitted)
    again = everything(task(written(tmp_path / "raw.csv", ROWS), fitted=fitted).valid)
    known = everything(task(folder).train)
    rows = {tuple(row) for row in again["x"].tolist()}
    assert {tuple(row) for row in known["x"].tolist()} <= rows
    assert again["y"].tolist() == [int(row[-1] == "yes") for row in ROWS]


def drawn(home: Path) -> Path:
    """Images of two sizes in folders of two classes."""
    for number in range(12):
        path = home / ("bright", "dark")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8 + number % 3, 10), 20 * number).save(path)
    return home


def test_folders_of_images_are_encoded_as_those_of_the_recipe_were(tmp_path: Path) -> None:
    raw, out = drawn(tmp_path / "raw"), tmp_path / "done"
    features = [{"kind": "image", "from": "image", "to": "x", "size": 6}, CLASSES]
    prepare({"read": str(raw), "features": features, "write": {"folder": str(out)}}, workers=1)
    known = task(out)
    again = everything(task(raw, fitted=known.fitted).valid)
    train = everything(known.train)
    assert sorted(map(str, train["x"].tolist())) == sorted(map(str, again["x"].tolist()))
    assert again["y"].tolist() == [0] * 6 + [1] * 6
    loose = everything(task(raw / "dark", fitted=known.fitted).valid)
    torch.testing.assert_close(loose["x"], again["x"][6:])
    assert "y" not in loose


def test_a_new_image_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    raw, out = drawn(tmp_path / "raw"), tmp_path / "done"
    features = [{"kind": "image", "from": "image", "to": "x", "size": 6}, CLASSES]
    prepare({"read": str(raw), "features": features, "write": {"folder": str(out)}}, workers=1)
    fitted = task(out).fitted
    (raw / "dark" / "03.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="not what the model knows: record 7: not a readable image"):
        task(raw, fitted=fitted)


def test_new_records_are_read_as_the_recipe_reads(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw.csv", tmp_path / "done"
    lines = [";".join(("none" if n % 7 == 0 else row[0], *row[1:])) for n, row in enumerate(ROWS)]
    raw.write_text("\n".join(lines) + "\n")
    names = ["width", "height", "colour", "bought"]
    read = {"path": str(raw), "names": names, "header": False}
    read |= {"delimiter": ";", "missing": ["none"]}
    prepare({"read": read, "features": FEATURES, "write": {"folder": str(out)}}, workers=1)
    known = task(out)
    again = everything(task(raw, fitted=known.fitted).valid)
    assert sorted(again["x"].tolist()) == sorted(everything(known.train)["x"].tolist())
    headed = tmp_path / "headed.csv"
    headed.write_text("height;width\n" + "".join(f"{row[1]};{row[0]}\n" for row in ROWS))
    named = everything(task(headed, fitted=known.fitted).valid)
    torch.testing.assert_close(named["x"][1:7], again["x"][1:7])


def test_new_rows_of_features_count_as_those_of_the_recipe(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw.libsvm", tmp_path / "done"
    raw.write_text("".join(f"{n % 2} {n % 3}:1 3:{n}\n" for n in range(12)))
    features = [{"kind": "sparse", "from": "features", "to": "x"}, CLASSES]
    read = {"path": str(raw), "zero_based": True}
    prepare({"read": read, "features": features, "write": {"folder": str(out)}}, workers=1)
    new = tmp_path / "new.libsvm"
    new.write_text("0 1:5\n")  # counted from 1 it would be the first
    found = everything(task(new, fitted=task(out).fitted).valid)
    assert found["x"].indices.tolist() == [1]


def test_records_without_a_target_can_be_predicted(folder: Path, tmp_path: Path) -> None:
    fitted = dict(task(folder).fitted)
    new = tmp_path / "new.csv"
    new.write_text("width,height,colour\n4,1,red\n", encoding="utf-8")
    assert sorted(everything(task(new, fitted=fitted).valid)) == ["x"]


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is fitted to classes that are made of two columns, by way of another feature."""
    home = tmp_path_factory.mktemp("crossed")
    raw = written(home / "raw.csv", ROWS)
    features = [
        FEATURES[0],
        {"kind": "cross", "from": ["colour", "bought"], "to": "_both"},
        {"kind": "classes", "from": "_both", "to": "y"},
    ]
    recipe = {"read": [{"path": str(raw)}], "features": features}
    prepare(recipe | {"write": {"folder": str(home / "done")}}, workers=1)
    return dict(task(home / "done").fitted)


def test_a_target_made_by_way_of_another_feature_is_made_of_raw_records(
    crossed: dict[str, Any], tmp_path: Path
) -> None:
    found = everything(task(written(tmp_path / "raw.csv", ROWS), fitted=crossed).valid)
    assert [crossed["labels"][y] for y in found["y"].tolist()] == [
        f"{colour} × {bought}" for _, _, colour, bought in ROWS
    ]


@pytest.mark.parametrize("names", ["width,height", "width,height,colour", "width,height,bought"])
def test_what_a_target_is_made_of_need_not_be_there_to_predict(
    crossed: dict[str, Any], names: str, tmp_path: Path
) -> None:
    new = tmp_path / "new.csv"
    new.write_text(f"{names}\n4,1{',red' * (names.count(',') - 1)}\n", encoding="utf-8")
    assert sorted(everything(task(new, fitted=crossed).valid)) == ["x"]


def test_evaluation_says_which_columns_the_target_is_made_of(
    crossed: dict[str, Any], folder: Path
) -> None:
    assert target_made_of(crossed) == ["bought", "colour"]
    assert target_made_of(task(folder).fitted) == ["bought"]
    assert target_made_of({"kind": "table", "target": "bought"}) == []


def test_records_that_lack_what_the_input_is_made_of_are_told(folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("width,colour\n4,red\n", encoding="utf-8")
    said = (
        r"new\.csv: new records must have .*: they lack 'height' \(their columns: width, colour\)"
    )
    with pytest.raises(DataError, match=said):
        task(new, fitted=dict(task(folder).fitted))


def test_records_need_not_have_what_other_features_are_made_of(
    folder: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.csv"
    new.write_text("width,height,bought\n4,1,no\n", encoding="utf-8")
    assert sorted(everything(task(new, fitted=dict(task(folder).fitted)).valid)) == ["x", "y"]


def test_a_target_that_is_kept_as_it_is_is_known_of_raw_records(tmp_path: Path) -> None:
    raw, done = written(tmp_path / "raw.csv", ROWS), tmp_path / "done"
    recipe = {"features": [FEATURES[1]], "keep": ["width"], "write": {"folder": str(done)}}
    prepare({"read": [{"path": str(raw)}], **recipe}, workers=1)
    fitted = dict(task(done, "regress", target="width", columns=["colours"]).fitted)
    found = everything(task(raw, "regress", fitted=fitted).valid)
    assert found["y"].tolist() == [float(row[0]) for row in ROWS]


def test_records_that_a_model_cannot_know_are_told(folder: Path, tmp_path: Path) -> None:
    fitted = dict(task(folder).fitted)
    odd = written(tmp_path / "odd.csv", [*ROWS[:2], ("1", "2", "red", "perhaps")])
    with pytest.raises(DataError, match=r"odd.csv: .*record 2: class 'perhaps'.*not in train"):
        task(odd, fitted=fitted)


def test_a_class_that_a_model_cannot_know_does_not_matter_where_nobody_asks(
    folder: Path, tmp_path: Path
) -> None:
    fitted = dict(task(folder).fitted)
    odd = written(tmp_path / "odd.csv", [*ROWS[:2], ("1", "2", "red", "perhaps")])
    found = everything(task(odd, fitted={**fitted, "target": None}).valid)
    assert sorted(found) == ["x"]
    known = written(tmp_path / "known.csv", [*ROWS[:2], ("1", "2", "red", ROWS[0][3])])
    assert torch.equal(found["x"], everything(task(known, fitted=fitted).valid)["x"])
    again = everything(task(folder, fitted={**fitted, "target": None}).valid)
    assert sorted(again) == ["x"]


def test_another_preparation_is_not_taken_for_the_same(folder: Path, tmp_path: Path) -> None:
    fitted = dict(task(folder).fitted)
    assert len(task(folder, fitted=fitted).valid) == 18
    other = tmp_path / "other"
    raw = written(tmp_path / "raw.csv", ROWS[:40])
    recipe = {"read": [{"path": str(raw)}], "features": FEATURES, "write": {"folder": str(other)}}
    prepare(recipe, workers=1)
    with pytest.raises(
        DataError, match="was prepared by another recipe, or learnt from other data"
    ):
        task(other, fitted=fitted)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("text_classify", {}, "column 'x' holds numbers: 'text_classify' is for tokens"),
        ("regress", {}, "its targets are classes: not for 'regress'"),
        ("classify", {"target": "z"}, "target column 'z'"),
        ("classify", {"columns": ["z"]}, "column 'z'"),
        (
            "classify",
            {"columns": ["x", "colours"]},
            "the input is one column, but there are x, col",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, name: str, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        task(folder, name, **data)


def test_what_the_recipe_says_cannot_be_said_again(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out has no effect on prepared data"):
        task(folder, held_out=0.5)


def test_texts_that_are_not_padded_make_batches_as_long_as_their_longest(tmp_path: Path) -> None:
    texts = [("good " * (1 + n % 9), "bad " * (1 + n % 9))[n % 2] for n in range(40)]
    raw = tmp_path / "raw.csv"
    lines = [f"{text.strip()},{text[:3]}" for text in texts]
    raw.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    tokens = {"kind": "tokens", "from": "text", "to": "x", "length": 6, "pad": False}
    recipe = {
        "read": [{"path": str(raw)}],
        "features": [tokens, {"kind": "classes", "from": "label", "to": "y"}],
        "write": {"folder": str(tmp_path / "done")},
    }
    prepare(recipe, workers=1)
    found = task(tmp_path / "done", "text_classify")
    lengths = everything(found.train)["x_length"]
    assert sorted(lengths.tolist()) == sorted(min(len(text.split()), 6) for text in texts)
    short = found.train.gather((lengths == 2).nonzero().flatten())["x"]
    assert short.shape[1] == 2
    again = everything(task(raw, "text_classify", fitted=dict(found.fitted)).valid)
    assert again["x"].shape == (len(texts), 6)
    model = found.model().eval()
    padded = again["x"][(again["x"] != 0).sum(1) == 2]
    torch.testing.assert_close(model(padded)[:1].sum(), model(padded[:1, :2]).sum())
    assert {tuple(row) for row in padded[:, :2].tolist()} == {tuple(row) for row in short.tolist()}
