"""New records on their way to a model: cleaned and encoded as those it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echelon.data.prepare import Prepared, prepare
from echelon.data.prepare.clean import STEPS
from echelon.data.prepare.encoders import Encoded

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
    """Of texts, numbers and labels; what is not said of the recipe is plain."""
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
