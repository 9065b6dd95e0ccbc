"""New records, cleaned and encoded as the training data was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echelon.core.errors import DataError
from echelon.data.prepare import Prepared, open_prepared, prepare
from echelon.data.prepare.encoders import Encoded, Encoders
from echelon.data.prepare.recipe import STEPS

ROWS = 40
STEPS_OF: dict[str, list[dict[str, Any]]] = {
    "text": [{"column": "text", "lower": True}],
    "length": [{"column": "text", "min": 1}],
    "missing": [{"column": "age", "how": "median"}, {"column": "age", "how": "drop"}],
    "range": [{"column": "age", "max": 100}],
    "types": [{"column": "label", "to": "string"}],
    "duplicates": [{}, {"columns": ["text"]}, {"columns": ["text"], "near": 0.8}],
    "noise": [{"label": "label", "column": "text"}],
}
NEW = {"text": ["word 1", "word 1"], "age": [1.0, 2.0], "label": ["odd", "even"]}


def prepared(folder: Path, **more: Any) -> Prepared:
    """Prepare texts, numbers and labels by a plain recipe with these settings."""
    path = folder / "raw.jsonl"
    rows = [
        {"text": f"word {at}", "age": float(at), "label": ("even", "odd")[at % 2]}
        for at in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    features = [
        {"kind": "standardise", "from": "age", "to": "x"},
        {"kind": "classes", "from": "label", "to": "y"},
    ]
    values = {"read": str(path), "features": features, "write": {"folder": str(folder / "out")}}
    return prepare(values | more, workers=1)


def listed(encoded: Encoded, name: str) -> Any:
    column: Any = encoded.columns[name]
    return column.tolist()


@pytest.mark.parametrize(
    "step", [{"kind": kind, **one} for kind in STEPS for one in STEPS_OF[kind]], ids=str
)
def test_new_records_pass_through_every_kind_of_step(tmp_path: Path, step: dict[str, Any]) -> None:
    encoded = prepared(tmp_path, clean=[step]).encode(NEW)
    assert encoded.rows.tolist() == [0, 1]
    assert listed(encoded, "y") == [1, 0]


@pytest.mark.parametrize(
    ("kind", "settings", "after"),
    [
        ("missing", {"how": "constant", "value": "none", "indicator": True}, ["none", " A ", "B"]),
        ("missing", {"how": "drop"}, [" A ", "B"]),
        ("text", {"lower": True}, [None, "a", "b"]),
        ("length", {"max": 1, "too_long": "cut"}, [None, " ", "B"]),
        ("types", {"to": "large_string"}, [None, " A ", "B"]),
    ],
)
def test_a_step_cleans_the_columns_there_are_when_the_label_is_not(
    tmp_path: Path, kind: str, settings: dict[str, Any], after: list[str | None]
) -> None:
    step = {"kind": kind, "column": ["text", "label"], **settings}
    new = pa.record_batch({"text": [None, " A ", "B"], "age": [1.0, 2.0, 3.0]})
    encoded = prepared(tmp_path, clean=[step]).encoders.encode(new, without=["label"])
    assert listed(encoded, "text") == after


@pytest.mark.parametrize("indicator", [False, True])
def test_a_gap_is_filled_though_the_target_of_the_same_step_is_absent(
    tmp_path: Path, indicator: bool
) -> None:
    step = {"kind": "missing", "column": ["age", "price"], "how": "median"}
    path = tmp_path / "prices.csv"
    path.write_text("age,price\n1,2\n3,\n5,6\n,8\n", encoding="utf-8")
    features = [{"kind": "join", "from": "age", "to": "x"}, {"kind": "join", "from": "price"}]
    done = prepared(
        tmp_path, read=str(path), clean=[step | {"indicator": indicator}], features=features
    )
    new = pa.record_batch({"age": [None, 4.0]})
    encoded = done.encoders.encode(new, without=["price"])
    assert listed(encoded, "x") == [[3.0], [4.0]]


@pytest.mark.parametrize(
    ("step", "age"),
    [
        ({"kind": "range", "max": 4, "how": "clip"}, pa.array([9.0, 2.0])),
        ({"kind": "types", "to": "float64"}, pa.array(["4", " 2 "])),
    ],
)
def test_numbers_are_cleaned_though_the_target_of_the_same_step_is_absent(
    tmp_path: Path, step: dict[str, Any], age: Any
) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("age,price\n1,2\n3,4\n", encoding="utf-8")
    features = [{"kind": "join", "from": "age", "to": "x"}, {"kind": "join", "from": "price"}]
    clean = [step | {"column": ["age", "price"]}]
    done = prepared(tmp_path, read=str(path), clean=clean, features=features)
    encoded = done.encoders.encode(pa.record_batch({"age": age}), without=["price"])
    assert listed(encoded, "x") == [[4.0], [2.0]]


def test_records_without_a_label_are_encoded_but_for_it(tmp_path: Path) -> None:
    encoded = prepared(tmp_path).encode({"age": [1.0, 2.0]})
    assert list(encoded.columns) == ["x"]
    assert encoded.rows.tolist() == [0, 1]


def test_a_label_that_is_not_taken_for_one_can_be_named(tmp_path: Path) -> None:
    features = [
        {"kind": "tokens", "from": "text", "to": "x", "length": 2},
        {"kind": "join", "from": "age", "to": "years"},
    ]
    encoded = prepared(tmp_path, features=features).encode({"text": ["word"]}, without=["age"])
    assert list(encoded.columns) == ["x"]


CROSSED = [
    {"kind": "standardise", "from": "age", "to": "x"},
    {"kind": "cross", "from": ["text", "label"], "to": "_both"},
    {"kind": "classes", "from": "_both", "to": "y"},
]


@pytest.mark.parametrize("given", [{}, {"text": ["word 1"]}, {"label": ["odd"]}])
def test_columns_made_of_an_absent_label_are_absent_too(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    encoded = prepared(tmp_path, features=CROSSED).encode({"age": [1.0], **given})
    assert list(encoded.columns) == ["x"]


def test_an_indicator_of_an_absent_column_is_absent_too(tmp_path: Path) -> None:
    step = {"kind": "missing", "column": ["age", "rent"], "how": "median", "indicator": True}
    path = tmp_path / "rents.csv"
    path.write_text("age,rent\n1,2\n3,\n5,6\n,8\n", encoding="utf-8")
    features = [
        {"kind": "join", "from": ["age", "age_missing"], "to": "x"},
        {"kind": "join", "from": ["rent", "rent_missing"], "to": "y"},
    ]
    done = prepared(tmp_path, read=str(path), clean=[step], features=features)
    encoded = done.encode({"age": pa.array([None], pa.float64())})
    assert list(encoded.columns) == ["x"]
    assert listed(encoded, "x") == [[3, 1]]


@pytest.mark.parametrize(
    ("more", "lacking"),
    [
        ({}, "'age'"),
        ({"clean": [{"kind": "text", "column": "text"}]}, "'age', 'text'"),
        ({"features": [{"kind": "join", "from": ["age"], "to": "_a"}, *CROSSED]}, "'age'"),
    ],
)
def test_records_that_lack_columns_of_the_recipe_are_refused(
    tmp_path: Path, more: dict[str, Any], lacking: str
) -> None:
    said = rf"they lack {lacking} \(their columns: years, label\)"
    with pytest.raises(DataError, match=said):
        prepared(tmp_path, **more).encode({"years": [1.0], "label": ["odd"]})


def test_prepared_data_can_be_opened_from_within_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared(tmp_path).folder)
    done = open_prepared(".")
    assert listed(done.encode(NEW), "y") == [1, 0]
    again = Encoders.from_json(done.encoders.to_json())
    assert listed(again.encode(pa.record_batch(NEW)), "y") == [1, 0]
