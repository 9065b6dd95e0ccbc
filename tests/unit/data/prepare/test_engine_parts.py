"""The parts that the engine is made of: columns, forms, files of what was learnt, workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare import load_recipe, recipe_from
from echelon.data.prepare.column_layout import Lengths, arrow, formed, joined, layout, part, seen
from echelon.data.prepare.outline import Outline, segments
from echelon.data.prepare.steps import Ragged, Sparse, rows, take
from echelon.data.prepare.workdir import load, pack, save, unpack
from echelon.data.prepare.workers import Task, WorkerError, Workers
from echelon.data.shards.layout import arrow_schema

OFFSETS = np.array([0, 2, 2, 5, 6])
COLUMNS: dict[str, Any] = {
    "number": np.arange(4, dtype=np.float32),
    "flag": np.array([True, False, True, True]),
    "image": np.arange(24, dtype=np.uint8).reshape(4, 2, 3),
    "tokens": Ragged(np.arange(6, dtype=np.int32), OFFSETS),
    "bag": Sparse(np.array([1, 3, 0, 2, 4, 4]), np.ones(6, np.float32), OFFSETS, 5),
    "text": pa.array(["a", "", "ccc", "ü"]),
    "raw": pa.array([1, 2, None, 4], pa.float64()),
}


def plain(values: Any) -> list[Any]:
    """Any column as a list of rows."""
    if isinstance(values, Ragged | Sparse):
        pairs = [values.values] if isinstance(values, Ragged) else [values.indices, values.values]
        spans = pairwise(values.offsets.tolist())
        return [[numbers[low:high].tolist() for numbers in pairs] for low, high in spans]
    return list(values.to_pylist() if isinstance(values, pa.Array) else values.tolist())


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_taken_cut_joined_and_stored(name: str) -> None:
    field, values = formed(name, COLUMNS[name])
    assert rows(values) == 4
    column = arrow(field, values)
    assert column.type == field.arrow_type()
    expected = plain(values)
    assert repr(plain(seen(field, column))) == repr(expected)
    halves = [part(values, 0, 1), part(values, 1, 4)]
    assert repr(plain(joined(field, halves))) == repr(expected)
    chosen = np.array([3, 0, 0, 2])
    assert repr(plain(take(values, chosen))) == repr([expected[at] for at in chosen])
    assert plain(take(values, np.empty(0, np.int64))) == []
    assert repr(plain(seen(field, column.slice(1, 2)))) == repr(expected[1:3])


def test_a_file_is_laid_out_as_arrow_would() -> None:
    """Without its memory; so filling it in gives the same bytes."""
    pairs = [formed(name, values) for name, values in COLUMNS.items()]
    schema = tuple(field for field, _ in pairs)
    batch = pa.RecordBatch.from_arrays([arrow(*pair) for pair in pairs], arrow_schema(schema).names)
    batch = batch.cast(arrow_schema(schema)) if batch.schema != arrow_schema(schema) else batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as stream:
        stream.write_batch(batch)
    whole = sink.getvalue().to_pybytes()
    entries = {"tokens": 6, "bag": 6, "text": 6}
    plan = layout(schema, {field.name: Lengths(4, entries.get(field.name, 0)) for field in schema})
    assert plan.size == len(whole)
    assert all(whole[at : at + len(text)] == text for at, text in plan.frame)
    at = plan.parts["image"][0]
    assert whole[at : at + 24] == bytes(range(24))
    assert np.frombuffer(whole, np.int64, 5, plan.parts["bag"][0]).tolist() == OFFSETS.tolist()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("x", np.zeros((2, 0)), "its samples are empty"),
        ("x", np.array(["a"]), "of type <U1"),
        ("x", Sparse(np.array([5]), np.ones(1), np.array([0, 1]), 5), "outside of width 5"),
    ],
)
def test_columns_that_no_shard_can_hold_are_refused(name: str, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        formed(name, values)


LEARNT = {
    "mean": np.array([1.5, np.nan], np.float32),
    "count": np.zeros((0, 3), np.int64),
    "words": pa.array(["ä", "b"]),
    "plain": {"a": [1, None, "x"]},
}


def kept_in_files(learnt: dict[str, Any]) -> dict[str, Any]:
    save(Path("kept"), learnt)
    return load(Path("kept"))


def sent(learnt: dict[str, Any]) -> dict[str, Any]:
    return unpack(pack(learnt))


@pytest.mark.parametrize("through", [kept_in_files, sent])
def test_what_was_learnt_comes_back(through: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    found = through(LEARNT)
    assert found.keys() == LEARNT.keys()
    np.testing.assert_array_equal(found["mean"], LEARNT["mean"])
    assert (found["count"].shape, found["count"].dtype) == ((0, 3), np.int64)
    assert found["words"].to_pylist() == ["ä", "b"]
    assert found["plain"] == LEARNT["plain"]


def test_what_was_learnt_must_be_whole() -> None:
    save(Path("kept"), LEARNT)
    Path("kept/learnt.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="kept: what was learnt cannot be read"):
        load(Path("kept"))


def test_steps_that_wait_for_all_records_end_a_stretch() -> None:
    kinds = [
        {"kind": "text", "column": "t"},
        {"kind": "missing", "column": "a", "how": "mean"},
        {"kind": "duplicates", "columns": ["t"]},
    ]
    base = {"read": "x", "keep": ["t"], "write": {"folder": "o"}}
    found = segments(recipe_from({**base, "clean": kinds}).steps())
    assert [(s.start, s.stop, s.looks, s.compares, s.last) for s in found] == [
        (0, 1, 1, None, False),
        (1, 2, None, 2, True),
    ]
    (only,) = segments([])
    assert (only.start, only.stop, only.last) == (0, 0, True)


BASE = "read: raw.csv\nkeep: [a]\nwrite: {folder: out}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep: [a]\nwrite: {folder: out}\n", "r.yaml:1: key 'read' is missing"),
        ("# nothing yet\n", "r.yaml:1: key 'read' is missing"),
        (BASE + "sed: 1\n", "r.yaml:4: key 'sed' is unknown; did you mean 'seed'"),
        (BASE + "features:\n- {kind: clases}\n", "r.yaml:5: features.0: kind of feature 'clases'"),
        (BASE + "clean:\n- {kind: txt}\n", "r.yaml:5: clean.0: kind of cleaning 'txt' is unknown"),
        (BASE + "clean:\n- {column: t}\n", "r.yaml:5: clean.0: it must say its kind"),
        (
            BASE + "features:\n- kind: classes\n  form: label\n",
            "key 'features.0.from' is missing",
        ),
        (BASE + "split: {by: time}\n", "r.yaml:4: split.by = 'time' needs a column"),
        (BASE + "split: {column: a}\n", "split.by = 'ratio' takes no column"),
        (BASE + "split: {train: 0.5}\n", "r.yaml:4: shares of train, valid and test are 0.5, 0, 0"),
        (BASE + "split: {folds: 5}\n", "r.yaml:4: cross-validation needs both: split.folds says"),
        (BASE + "split: {fold: 1}\n", "r.yaml:4: cross-validation needs both: split.folds says"),
        (
            BASE + "split:\n  folds: 5\n  fold: 5\n",
            "r.yaml:6: split.fold = 5: 5 folds are counted from 0 to 4",
        ),
        (
            BASE + "split: {by: time, column: a, folds: 5, fold: 0}\n",
            "r.yaml:4: split.folds does not go with by: time",
        ),
        (
            BASE + "split:\n  folds: 5\n  fold: 0\n  train: 0.8\n",
            "r.yaml:7: split.folds says how many are for training and test: take out split.train",
        ),
        (
            BASE + "split: {folds: 2, fold: 0, valid: 0.5}\n",
            "r.yaml:4: split.valid = 0.5 and a fold of 1/2 leave nothing to train on",
        ),
        (BASE + "split: {folds: 1, fold: 0}\n", "r.yaml:4: split.folds"),
        (
            "read: [a, {path: b, split: test}]\nkeep: [a]\nwrite: {folder: out}\n"
            "split: {folds: 5, fold: 0}\n",
            "r.yaml:1: read.1: with split.folds the test is a fold, and no input can be for it",
        ),
        (BASE + "balance: {column: a, at_most: 2}\n", "balance.at_most is for how: resample"),
        (
            "read: [{path: a, split: tain}]\nkeep: [a]\nwrite: {folder: out}\n",
            "r.yaml:1: read.0: split 'tain' is unknown; did you mean 'train'",
        ),
        ("read: []\nkeep: [a]\nwrite: {folder: out}\n", "reads at least one input"),
        ("read: a\nwrite: {folder: out}\n", "nothing would be written"),
        ("read: a\nkeep: [a]\nwrite: {folder: o, rows: 1, shards: 1}\n", "not both"),
        ("read: a\nkeep: [a]\nwrite: {folder: .}\n", ":3: write.folder = '.': it must end with"),
        ("read: a\nkeep: [a]\nwrite: {folder: /}\n", "write.folder = '/': it must end with"),
        ("read: a\nkeep: [a]\nwrite: {folder: b/..}\n", "the name of a folder of its own"),
        ('read: a\nkeep: [a]\nwrite: {folder: "a\\0b"}\n', "and hold no NUL"),
    ],
)
def test_a_bad_recipe_is_one_line_with_its_place(text: str, message: str) -> None:
    Path("r.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_recipe(Path("r.yaml"))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_inputs_lie_beside_their_recipe() -> None:
    Path("there").mkdir()
    Path("there/raw.csv").write_text("a\n1\n")
    Path("there/r.yaml").write_text(BASE, encoding="utf-8")
    found = load_recipe(Path("there/r.yaml"), ["seed=7"]).recipe
    assert found.read[0].path == "there/raw.csv"
    assert found.seed == 7


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_is_told_in_one_line(tmp_path: Path) -> None:
    recipe = recipe_from({"read": "x", "keep": ["t"], "write": {"folder": "o"}})
    setting = {"recipe": recipe.values(), "desk": str(tmp_path)}
    with closing(Workers(1, setting)) as pool:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "000000.json").write_text("[1]")  # was done before
        assert list(pool.map([Task("known", {"stage": "s", "number": 0})])) == [[1]]
        odd = Task("odd", {"stage": "s", "number": 1, "do": "odd"})
        with pytest.raises(WorkerError, match="odd: AssertionError") as raised:
            list(pool.map([odd]))
        assert "Traceback" in raised.value.__notes__[0]
    with closing(Workers(1, setting)) as pool:
        os.kill(pool._hands[0].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker 0 was killed by SIGKILL .* at: odd"):
            list(pool.map([odd]))


def test_only_texts_that_nobody_reads_as_such_are_numbered() -> None:
    names = ["town", "street", "kept", "label", "told", "age"]
    kinds = [pa.large_utf8()] * 5 + [pa.int64()]
    recipe = recipe_from(
        {
            "read": "raw.csv",
            "split": {"by": "stratified", "column": "label", "train": 0.9, "test": 0.1},
            "features": [
                {"kind": "one_hot", "from": ["town", "street", "kept", "label", "age"], "to": "x"},
                {"kind": "target", "from": "town", "to": "t", "label": "told", "of": "class"},
                {"kind": "hashed", "from": "street", "to": "h", "buckets": 10},
            ],
            "keep": ["kept"],
            "write": {"folder": "out"},
        }
    )
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    outline = Outline(recipe, schema, recipe.steps(), recipe.made())
    assert outline.categories == {"town"}
