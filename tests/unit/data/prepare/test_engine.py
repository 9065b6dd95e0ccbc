"""Preparing data end to end: what is written, what is quarantined, what is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare import Prepared, engine, open_prepared, prepare, write
from echelon.data.prepare.workers import Unwatched
from echelon.data.shards import ShardSource, verify_shards

ROWS = 600


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several blocks, and several windows of a shard, from little data."""
    monkeypatch.setattr(engine, "SIZE", 4096)
    monkeypatch.setattr(write, "WINDOW", 2048)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write labels, numbers and words; one record in four is of the rare class."""
    rng = np.random.default_rng(0)
    path = tmp_path / "raw.csv"
    lines = ["id,label,age,text"]
    for at in range(ROWS):
        label = "rare" if at % 4 == 0 else "common"
        words = " ".join(f"w{word}" for word in rng.integers(0, 50, at % 7 + 1))
        lines.append(f"{at},{label},{rng.normal():.6f},{words}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def recipe(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "read": str(path),
        "split": {"by": "stratified", "column": "label", "train": 0.8, "valid": 0.2},
        "features": [{"kind": "classes", "from": "label", "to": "y"}],
        "keep": ["id", "age", "text"],
        "write": {"folder": "prepared", "shards": 3},
    } | more


def records(done: Prepared, split: str) -> dict[str, Any]:
    """Return all columns of a split that a source can give."""
    source = ShardSource(done.path(split))
    return dict(source.gather(torch.arange(len(source))))


def set_aside(done: Prepared) -> list[dict[str, Any]]:
    text = (done.folder / "quarantine.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_record_is_written_once_with_its_own_values(table: Path) -> None:
    done = prepare(recipe(table), workers=1)
    expected = {
        int(cells[0]): (cells[1], float(cells[2]))
        for cells in (line.split(",") for line in table.read_text().splitlines()[1:])
    }
    seen: dict[int, tuple[str, float]] = {}
    for split in ("train", "valid"):
        verify_shards(done.path(split))
        found = records(done, split)
        for at, number in enumerate(found["id"].tolist()):
            assert number not in seen
            label = ("common", "rare")[int(found["y"][at])]
            seen[number] = (label, float(found["age"][at]))
    assert seen == expected
    assert done.counts["read"] == done.counts["kept"] == ROWS
    assert done.counts["written"] == {"train": 480, "valid": 120, "test": 0}


def test_shards_of_a_split_are_alike(table: Path) -> None:
    done = prepare(recipe(table), workers=1)
    assert [entry.rows for entry in done.manifest("train").shards] == [160, 160, 160]
    labels = records(done, "train")["y"].view(3, 160).sum(1).tolist()
    assert max(labels) - min(labels) <= 1


def test_records_are_shuffled_by_seed(table: Path) -> None:
    one = records(prepare(recipe(table), workers=1), "train")["id"].tolist()
    other = prepare(recipe(table, seed=1, write={"folder": "other", "shards": 3}), workers=1)
    assert one != sorted(one)
    assert one != records(other, "train")["id"].tolist()


def test_how_a_shard_is_gathered_does_not_show(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(recipe(table), workers=1)
    monkeypatch.setattr(write, "WINDOW", 1 << 20)
    prepare(recipe(table, write={"folder": "whole", "shards": 3}), workers=1)
    one, other = (files(Path(folder)) for folder in ("prepared", "whole"))
    shards = [name for name in one if name.endswith(".arrow")]
    assert len(shards) == 6
    assert all(one[name] == other[name] for name in shards)


def test_statistics_are_those_of_the_columns(table: Path) -> None:
    done = prepare(recipe(table), workers=1)
    figures = done.manifest("train").statistics
    ages = records(done, "train")["age"].numpy()
    assert figures["age"]["mean"] == pytest.approx(ages.mean(), abs=1e-9)
    assert figures["age"]["std"] == pytest.approx(ages.std(), abs=1e-9)
    assert figures["y"]["counts"] == {"0": 360, "1": 120}


def test_bad_records_are_set_aside_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "some.tsv.gz"
    lines = [b"label\ttext", b"a\tgood", b"b\tgood too", b"a", b"b\tbro\xffken", b"a\tfine"]
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    values = recipe(path, split=None, keep=["text"])
    done = prepare(values, workers=1)
    outs = set_aside(done)
    assert [(Path(out["file"]).name, out["line"], out["step"]) for out in outs] == [
        ("some.tsv.gz", 4, "read"),
        ("some.tsv.gz", 5, "read"),
    ]
    assert done.counts["read"] == 5
    assert done.counts["out"] == {"read": 2}
    assert done.counts["kept"] == done.counts["written"]["train"] == 3
    with pytest.raises(DataError, match=r"some\.tsv\.gz:4: "):
        prepare(values | {"bad": "refuse", "write": {"folder": "no"}}, workers=1)
    assert not Path("no").exists()


def test_a_label_that_train_does_not_have_is_set_aside(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "test.csv"
    other.write_text("id,label,age,text\n1,common,0.5,x\n2,new,0.5,y\n", encoding="utf-8")
    read = [str(table), {"path": str(other), "split": "test"}]
    done = prepare(recipe(table, read=read), workers=1)
    (out,) = set_aside(done)
    assert (Path(out["file"]).name, out["line"]) == ("test.csv", 3)
    assert out["reason"] == ("class 'new' of column 'label' is not in train (there: common, rare)")
    assert done.counts["out"] == {"features.0 classes": 1}
    assert records(done, "test")["id"].tolist() == [1]
    with pytest.raises(DataError, match=r"test\.csv:3: class 'new'"):
        prepare(recipe(table, read=read, bad="refuse", write={"folder": "no"}), workers=1)


def test_records_without_a_key_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    path.write_text("label,n\n1,1\n,2\n0,\n1,4\n", encoding="utf-8")
    split = {"by": "stratified", "column": "label", "train": 1.0}
    values = recipe(path, split=split, features=[], keep=["label", "n"])
    done = prepare(values, workers=1)
    outs = set_aside(done)
    assert [(out["line"], out["step"]) for out in outs] == [(3, "split"), (4, "keep")]
    assert done.counts["kept"] == 2


@pytest.mark.parametrize("split", [None, {"by": "stratified", "column": "label", "train": 1.0}])
def test_a_label_that_is_an_empty_text_is_none(tmp_path: Path, split: Any) -> None:
    path = tmp_path / "gaps.csv"
    path.write_text("label,n\nneg,1\n,2\npos,3\n,4\n", encoding="utf-8")
    done = prepare(recipe(path, split=split, keep=["n"]), workers=1)
    assert done.learnt("y")["classes"] == ["neg", "pos"]
    assert [out["line"] for out in set_aside(done)] == [3, 5]
    assert all("column 'label' has no value" in out["reason"] for out in set_aside(done))


def test_a_label_that_is_not_a_number_is_none(tmp_path: Path) -> None:
    path = tmp_path / "gaps.parquet"
    pq.write_table(pa.table({"label": [1.0, float("nan"), 0.0, None], "n": [1, 2, 3, 4]}), path)
    done = prepare(recipe(path, split=None, keep=["n"]), workers=1)
    assert done.learnt("y")["classes"] == ["0", "1"]
    reason = "column 'label' has no value: it is the class"
    assert [out["reason"] for out in set_aside(done)] == [reason] * 2


def test_records_with_an_empty_text_for_a_group_are_no_group(tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    lines = [f"{'' if at % 4 == 0 else f'g{at % 5}'},{at % 2},{at}" for at in range(40)]
    path.write_text("\n".join(["group,label,n", *lines]) + "\n", encoding="utf-8")
    split = {"by": "group", "column": "group", "train": 0.5, "test": 0.5}
    done = prepare(recipe(path, split=split, keep=["n"]), workers=1)
    assert done.counts["out"] == {"split": 10}
    reason = "column 'group' has no value: records are divided by it"
    assert {out["reason"] for out in set_aside(done)} == {reason}


def test_rare_classes_are_written_more_often(table: Path) -> None:
    values = recipe(table, balance={"column": "label", "how": "resample"})
    done = prepare(values, workers=1)
    train = records(done, "train")
    assert Counter(train["y"].tolist()) == {0: 360, 1: 360}
    assert set(Counter(train["id"].tolist()).values()) == {1, 3}
    assert Counter(records(done, "valid")["id"].tolist()).most_common(1)[0][1] == 1


def test_rare_classes_weigh_more(table: Path) -> None:
    done = prepare(recipe(table, balance={"column": "label"}), workers=1)
    train = records(done, "train")
    weights = {int(y): float(w) for y, w in zip(train["y"], train["weight"], strict=True)}
    assert weights[1] == pytest.approx(3 * weights[0])
    assert float(train["weight"].mean()) == pytest.approx(1)


def test_the_same_again_does_nothing_and_another_recipe_asks(table: Path) -> None:
    first = prepare(recipe(table), workers=1)
    again = prepare(recipe(table), workers=1)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.facts == first.facts
    with pytest.raises(DataError, match="another recipe or of other inputs; say --overwrite"):
        prepare(recipe(table, seed=1), workers=1)
    assert prepare(recipe(table, seed=1), workers=1, overwrite=True).fresh
    assert not list(Path().glob(".*"))


def test_other_files_are_not_touched(table: Path) -> None:
    Path("prepared").mkdir()
    Path("prepared/mine.txt").write_text("precious")
    with pytest.raises(DataError, match="holds other files"):
        prepare(recipe(table), workers=1)
    with pytest.raises(DataError, match="is a file"):
        prepare(recipe(table, write={"folder": str(table)}), workers=1)
    assert Path("prepared/mine.txt").read_text() == "precious"


def test_new_records_are_encoded_as_the_old_ones(table: Path) -> None:
    prepare(recipe(table), workers=1)
    done = open_prepared("prepared")
    encoded = done.encode(
        {"id": [7, 8, 9], "label": ["rare", "odd", "common"], "age": [0.0] * 3, "text": ["x"] * 3}
    )
    assert encoded.rows.tolist() == [0, 2]
    assert np.asarray(encoded.columns["y"]).tolist() == [1, 0]
    assert list(encoded.refused) == [1]
    assert done.learnt("y")["classes"] == ["common", "rare"]
    with pytest.raises(DataError, match="no feature makes 'z'"):
        done.learnt("z")
    with pytest.raises(DataError, match="has no split 'test'"):
        done.path("test")


def test_nothing_to_prepare_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(DataError, match=r"there is nothing to prepare: .*empty\.csv"):
        prepare(recipe(empty), workers=1)
    with pytest.raises(DataError, match="it must be at least 1"):
        prepare(recipe(empty), workers=0)


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (
            "n,label\n1,a\n2,b\n3,a\n",
            {
                "columns": {"label": "int64"},
                "clean": [{"kind": "missing", "column": "n", "how": "mean"}],
            },
            r"left to prepare: 3 were taken out \(read 3\); the first: .*some\.csv:2: column "
            r"'label' is 'a': not of type int64",
        ),
        (
            "n,label\n1,a\n2\n3,a\n",
            {"clean": [{"kind": "range", "column": "n", "max": 0}]},
            r"left to prepare: 3 were taken out \(read 1, clean\.0 range 2\); the first: "
            r".*some\.csv:3: 1 cell, but there are 2 columns",
        ),
        (
            "n,label\n1,\n2,\n",
            {},
            r"left to write: 2 were taken out \(features\.0 classes 2\); the first: "
            r".*some\.csv:2: column 'label' has no value",
        ),
        (
            "1,2,3\n4,5,6\n",
            {"read": {"path": "some.csv", "names": ["n", "label"]}},
            r"nothing to prepare: none of the first 2 records can be read; the first: "
            r"some\.csv:1: 3 cells, but there are 2 columns",
        ),
        (
            'n,label\n1,"a\n2,"b\n',
            {},
            r"nothing to prepare: none of the first 2 records can be read; the first: "
            r".*some\.csv:2: its quotes do not match",
        ),
    ],
)
def test_an_empty_result_reports_what_became_of_all_records(
    tmp_path: Path, content: str, more: dict[str, Any], message: str
) -> None:
    path = tmp_path / "some.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        prepare(recipe(path, **({"split": None, "keep": ["n"]} | more)), workers=1)


def test_an_empty_result_reports_what_became_of_all_images(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        (tmp_path / "pets" / name / "one.png").write_bytes(b"none")
    message = (
        r"left to prepare: 2 were taken out \(read 2\); the first: .*cat/one\.png:1: not an image"
    )
    with pytest.raises(DataError, match=message):
        prepare(recipe(tmp_path / "pets", split=None, keep=[]), workers=1)


def test_all_for_the_test_leaves_none_to_learn_from(table: Path) -> None:
    read = {"path": str(table), "split": "test"}
    with pytest.raises(DataError, match="no records are left for training"):
        prepare(recipe(table, read=read, split=None), workers=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"columns": {"agee": "float64"}},
            r"columns: .*raw\.csv: column 'agee' is unknown; did you mean 'age'\? \(choices: age,",
        ),
        (
            {"features": [{"kind": "standardise", "from": [], "to": "x"}]},
            r"feature standardise: from = \[\]: name at least one column",
        ),
        (
            {"clean": [{"kind": "text", "column": []}]},
            r"step text: column = \[\]: name at least one",
        ),
        ({"keep": ["agee"]}, "keep: column 'agee' is unknown; did you mean 'age'"),
        ({"split": {"by": "group", "column": "grop"}}, "split: column 'grop' is unknown"),
        ({"balance": {"column": "labl"}}, "balance: column 'labl' is unknown; did you mean"),
        (
            {"features": [{"kind": "classes", "from": "lable"}]},
            "feature classes: column 'lable' is unknown; did you mean 'label'",
        ),
        (
            {"features": [{"kind": "classes", "from": "label", "to": "age"}]},
            "column 'age' is to be kept as it is",
        ),
        (
            {
                "features": [
                    {"kind": "classes", "from": "label", "to": "y"},
                    {"kind": "classes", "from": "age", "to": "y"},
                ]
            },
            "column 'y' is made by features.0 already",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(
    table: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(recipe(table, **more), workers=1)
    assert not list(Path().glob(".*"))


DATE = pa.array([date(2026, 1, day + 1) for day in range(4)])
UNSTORED = {
    "date": (DATE, "of type date32"),
    "struct": (pa.array([{"a": 1}] * 4), "of type struct"),
    "list": (pa.array([["a"]] * 4), "of type large_string"),
    "bytes": (pa.array([b"a"] * 4), "of type large_binary"),
    "pairs": (pa.array([[{"index": 1, "value": 2.0}]] * 4), "sparse, but its field says no width"),
}


@pytest.mark.parametrize("name", UNSTORED)
def test_a_column_that_shards_cannot_hold_is_refused_before_any_work(
    tmp_path: Path, name: str
) -> None:
    values, message = UNSTORED[name]
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "c": values}), tmp_path / "a.parquet")
    more = {"split": None, "features": [], "keep": ["n", "c"]}
    watch = Unwatched()
    watch.began = lambda *_: pytest.fail("work has begun")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"keep: column 'c' is {message}"):
        prepare(recipe(tmp_path / "a.parquet", **more), workers=1, watch=watch)


@pytest.mark.parametrize("size", [-1, 2])
def test_a_list_with_a_gap_that_is_kept_costs_its_own_record(tmp_path: Path, size: int) -> None:
    lists = pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int64(), size))
    floats = [[1.0, 2.0], [1.0, 2.0], [float("nan"), 2.0], [1.0, None], [5.0, 6.0]]
    whole = pa.concat_arrays([lists, lists.slice(3)])
    columns = {"l": whole, "f": pa.array(floats, pa.list_(pa.float64(), size)), "n": range(5)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    more = {"split": None, "features": [], "keep": ["l", "f", "n"]}
    done = prepare(recipe(tmp_path / "a.parquet", **more), workers=1)
    assert sorted(records(done, "train")["n"].tolist()) == [0, 4]
    assert [(out["line"], out["reason"]) for out in set_aside(done)] == [
        (2, "column 'l' has no value"),
        (3, "column 'l' has a list in which a value is missing"),
        (4, "column 'f' has a list in which a value is missing"),
    ]


def test_a_column_that_is_kept_has_a_value_whatever_its_type(tmp_path: Path) -> None:
    columns = {
        "i": pa.array([1, None, 3, 4, 5], pa.int64()),
        "f": pa.array([1.5, 2.5, None, float("nan"), 5.5]),
        "t": pa.array(["a", "b", "c", "d", ""]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    more = {"split": None, "features": [], "keep": ["i", "f", "t"]}
    done = prepare(recipe(tmp_path / "a.parquet", **more), workers=1)
    found = records(done, "train")
    assert sorted(zip(found["i"].tolist(), found["f"].tolist(), strict=True)) == [
        (1, 1.5),
        (5, 5.5),
    ]
    assert [(out["line"], out["reason"]) for out in set_aside(done)] == [
        (2, "column 'i' has no value"),
        (3, "column 'f' has no value"),
        (4, "column 'f' has no value"),
    ]
    assert done.counts["out"] == {"keep": 3}


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"keep": ["weight"]}, "keep"),
        ({"features": [{"kind": "classes", "from": "label", "to": "weight"}]}, r"features\.0"),
    ],
)
def test_weights_of_balance_replace_no_column(
    tmp_path: Path, more: dict[str, Any], where: str
) -> None:
    path = tmp_path / "weighed.csv"
    path.write_text("label,weight\na,1.5\nb,2.5\n", encoding="utf-8")
    values = recipe(path, split=None, keep=[], balance={"column": "label"}) | more
    with pytest.raises(ConfigError, match=f"{where}: balance writes a column 'weight' of its own"):
        prepare(values, workers=1)
    prepare(values | {"balance": {"column": "label", "how": "resample"}}, workers=1)


@pytest.mark.parametrize("value", [[1], {"a": 1}])
@pytest.mark.parametrize(
    "more",
    [
        {"balance": {"column": "odd"}},
        {"split": {"by": "group", "column": "odd"}},
        {"split": {"by": "stratified", "column": "odd"}},
    ],
)
def test_records_are_not_divided_by_lists_or_structs(
    tmp_path: Path, value: Any, more: dict[str, Any]
) -> None:
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"odd": [value, value], "label": ["a", "b"]}), path)
    (where,) = more
    with pytest.raises(ConfigError, match=f"{where}: column 'odd' is of type .*: records are div"):
        prepare(recipe(path, split=None, keep=[]) | more, workers=1)


def test_records_are_divided_by_bytes_whether_they_are_text_or_not(tmp_path: Path) -> None:
    path = tmp_path / "bytes.parquet"
    groups = [bytes([0xF0 + at % 5]) for at in range(20)]
    pq.write_table(pa.table({"group": groups, "label": ["a", "b"] * 10}), path)
    split = {"by": "group", "column": "group", "train": 0.6, "test": 0.4}
    done = prepare(recipe(path, split=split, keep=[]), workers=1)
    assert done.counts["written"] == {"train": 12, "valid": 0, "test": 8}


def test_every_record_is_the_test_of_one_fold(table: Path) -> None:
    split = {"by": "stratified", "column": "label", "folds": 3, "valid": 0.1}
    tests: list[int] = []
    for fold in range(3):
        write = {"folder": f"fold-{fold}", "shards": 2}
        done = prepare(recipe(table, split=split | {"fold": fold}, write=write), workers=1)
        found = {name: records(done, name) for name in ("train", "valid", "test")}
        assert [len(part["id"]) for part in found.values()] == [340, 60, 200]
        assert [int(part["y"].sum()) for part in found.values()] == [85, 15, 50]  # rare
        tests += found["test"]["id"].tolist()
        assert len({one for part in found.values() for one in part["id"].tolist()}) == ROWS
    assert sorted(tests) == list(range(ROWS))


def test_folds_need_records_to_divide(table: Path) -> None:
    read = {"path": str(table), "split": "train"}
    with pytest.raises(DataError, match="split into 5 folds: there are only 0 records to divide"):
        prepare(recipe(table, read=read, split={"folds": 5, "fold": 0}), workers=1)
