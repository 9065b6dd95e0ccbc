"""`inspect` profiles any readable data in one pass."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from echelon.core.errors import DataError
from echelon.core.format import to_json
from echelon.core.types import Sparse
from echelon.data import write_shards
from echelon.data.inspect import inspect
from echelon.data.inspect.profile import ColumnProfile, PartProfile

CSV = "age,city,score,label\n" + "".join(
    f"{'' if n % 10 == 0 else 20 + n % 5},{('Bonn', 'Ulm', '', 'NA')[n % 4]},{n / 8},{n % 3}\n"
    for n in range(240)
)


def only(path: Path, **settings: Any) -> PartProfile:
    (part,) = inspect(path, **settings).parts
    return part


def of(columns: dict[str, Any], tmp_path: Path) -> dict[str, ColumnProfile]:
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    return {column.name: column for column in only(tmp_path / "x.parquet").columns}


def test_a_table_is_summed_up_column_by_column(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    part = only(tmp_path / "x.csv")
    assert (part.format, part.records, part.files, part.bytes) == ("csv", 240, 1, len(CSV))
    age, city, score, label = part.columns
    assert [column.kind for column in part.columns] == ["number", "text", "number", "number"]
    assert (age.missing, age.present) == (24, 216)
    assert age.counts == {24: 48, 22: 48, 21: 48, 23: 48, 20: 24}
    assert (city.missing, city.blank, city.distinct) == (0, 120, (4, True))
    assert city.is_category
    assert score.numbers is not None
    assert (score.numbers.min, score.numbers.max, score.numbers.mean) == (0, 29.875, 14.9375)
    assert not score.is_category
    assert part.label == "label"
    assert part.balance == {0: 80, 1: 80, 2: 80}
    assert label.type == "int64"


def test_examples_are_records_of_the_data_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("n,m\n" + "".join(f"{n},{n * n}\n" for n in range(500)))
    part = only(tmp_path / "x.csv", examples=7)
    assert len(part.examples) == 7
    assert all(
        example.values == {"n": example.record, "m": example.record**2} for example in part.examples
    )
    records = [example.record for example in part.examples]
    assert records == sorted(records)
    assert records[-1] > 100
    assert only(tmp_path / "x.csv", examples=0).examples == ()


def test_texts_have_lengths_in_characters_and_words(tmp_path: Path) -> None:
    texts = ["", "  ", "one", "zwei Wörter", " drei  ganze Wörter "]
    found = of({"text": texts * 4}, tmp_path)["text"]
    assert found.lengths is not None
    assert found.words is not None
    assert (found.lengths.min, found.lengths.max, found.unit) == (0, 20, "characters")
    assert found.words.quantiles[99] == 3
    assert found.words.histogram.counts == [8, 4, 4, 4]
    assert found.blank == 4


def test_columns_of_every_type_are_understood(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 1, 1)
    times = [day + datetime.timedelta(days=n) for n in range(6)]
    found = of(
        {
            "time": pa.array(times, pa.timestamp("ns")),
            "day": pa.array([t.date() for t in times]),
            "took": pa.array([datetime.timedelta(seconds=n) for n in range(6)]),
            "half": pa.array(np.arange(6), pa.float16()),
            "price": pa.array([1, 2, 3, None, 5, 6]).cast(pa.decimal128(25, 2)),
            "word": pa.array(["a", "b"] * 3).dictionary_encode(),
            "words": [["a"] * n for n in range(6)],
            "ids": [list(range(n)) for n in range(6)],
            "vector": pa.array([[n, n + 1.0] for n in range(6)], pa.list_(pa.float32(), 2)),
            "yes": [True, None, True, False, True, True],
            "raw": [b"\xff\x00"] * 6,
            "object": [{"a": n, "b": {"c": "x"}} for n in range(6)],
            "nothing": pa.nulls(6),
            "gaps": [1.0, float("nan"), None, float("inf"), 0.0, 1.0],
        },
        tmp_path,
    )
    assert {name: column.kind for name, column in found.items()} == {
        **{"time": "time", "day": "time", "took": "number", "half": "number", "price": "number"},
        **{"word": "text", "words": "sequence", "ids": "sequence", "vector": "tensor"},
        **{"yes": "number", "raw": "bytes", "object.a": "number", "object.b.c": "text"},
        **{"nothing": "empty", "gaps": "number"},
    }
    assert found["time"].span == ("2024-01-01 00:00:00", "2024-01-06 00:00:00")
    assert found["took"].numbers is not None
    assert found["took"].numbers.max == 5_000_000
    assert (found["price"].missing, found["nothing"].missing) == (1, 6)
    assert (found["gaps"].missing, found["gaps"].distinct) == (2, (3, True))
    assert found["gaps"].numbers is not None
    assert found["gaps"].numbers.infinite == 1
    assert found["yes"].counts == {True: 4, False: 1}
    assert found["ids"].lengths is not None
    assert found["ids"].numbers is not None
    assert (found["ids"].lengths.mean, found["ids"].numbers.max) == (2.5, 4)
    assert found["vector"].shape == (2,)


def test_images_have_figures_of_all_pixels_and_of_each_channel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 200, (300, 3, 6, 5), np.uint8)
    pixels[:, 2] = 255
    np.savez(tmp_path / "x.npz", x=pixels, y=np.arange(300) % 2)
    x, _ = only(tmp_path / "x.npz").columns
    assert x.numbers is not None
    assert (x.type, x.shape) == ("uint8 [3, 6, 5]", (3, 6, 5))
    assert x.numbers.count == pixels.size
    assert (x.numbers.mean, x.numbers.std) == pytest.approx((pixels.mean(), pixels.std()))
    assert x.numbers.quantiles[50] == pytest.approx(np.median(pixels), abs=4)
    assert x.channels is not None
    assert x.channels[2] == (255, 0)
    assert x.channels[0][0] == pytest.approx(pixels[:, 0].mean())


def test_shards_are_read_with_all_their_kinds(tmp_path: Path) -> None:
    offsets = torch.arange(0, 201, 2)
    columns = {
        "bag": Sparse(torch.arange(200) % 30, torch.ones(200), offsets, 30),
        "tokens": [np.arange(n % 5) for n in range(100)],
        "x": torch.zeros(100, 4, dtype=torch.bfloat16),
        "y": np.arange(100) % 4,
    }
    for name in ("train", "test", "other"):
        write_shards(tmp_path / "set" / name, [columns], rows_per_shard=30)
    profile = inspect(tmp_path / "set")
    assert [part.name for part in profile.parts] == ["train", "test", "other"]
    assert profile.records == 300
    bag, tokens, x, y = profile.parts[0].columns
    assert (bag.kind, bag.type) == ("sparse", "sparse float of width 30")
    assert bag.lengths is not None
    assert bag.lengths.mean == 2
    assert (tokens.kind, x.type, y.counts) == ("sequence", "float [4]", dict.fromkeys(range(4), 25))
    assert profile.parts[0].label == "y"


def test_what_is_found_does_not_depend_on_how_the_data_is_cut(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = pa.table({"x": random.normal(size=9000), "t": [f"{n}" for n in range(9000)]})
    parquet.write_table(table, tmp_path / "one.parquet")
    whole = only(tmp_path / "one.parquet").as_data()
    cut = only(tmp_path / "one.parquet", rows=700).as_data()
    assert whole["examples"] == cut["examples"]
    for a, b in zip(whole["columns"], cut["columns"], strict=True):
        assert a["distinct"] == b["distinct"]
        figures = a.get("numbers") or a["lengths"]
        others = b.get("numbers") or b["lengths"]
        assert figures["quantiles"] == others["quantiles"]
        assert figures["mean"] == pytest.approx(others["mean"])


def test_a_profile_is_plain_data(tmp_path: Path) -> None:
    lines = [{"a": n, "when": "x" * 1000, "l": [n] * 50, "o": {"p": n / 7}} for n in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(to_json(inspect(tmp_path / "x.jsonl").as_data()))
    (part,) = found["parts"]
    assert [column["name"] for column in part["columns"]] == ["a", "when", "l", "o.p"]
    values = part["examples"][0]["values"]
    assert len(values["when"]) == 300
    assert values["l"][-1] == "… 38 more"
    assert part["columns"][0]["numbers"]["quantiles"]["p50"] == 9


def test_the_label_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    part = only(tmp_path / "x.csv", label="city")
    assert part.balance == {"Bonn": 60, "Ulm": 60, "": 60, "NA": 60}
    with pytest.raises(DataError, match="label column 'citty' is unknown; did you mean 'city'"):
        inspect(tmp_path / "x.csv", label="citty")


def test_a_label_that_is_not_there_is_said_before_all_is_read(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "x.parquet")
    heard: list[int] = []
    with pytest.raises(DataError, match="label column 'z' is unknown"):
        inspect(tmp_path / "x.parquet", label="z", told=heard.append, rows=100)
    assert heard == [0, 100]


def test_a_file_without_names_has_its_label_first(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("".join(f"{n % 3},{n}\n" for n in range(99)))
    assert only(tmp_path / "x.csv").balance == {0: 33, 1: 33, 2: 33}
    (tmp_path / "x.csv").write_text("".join(f"{n},{n % 3}\n" for n in range(99)))
    assert only(tmp_path / "x.csv").label is None


def test_a_label_of_numbers_is_no_class(tmp_path: Path) -> None:
    column = of({"target": np.random.default_rng(0).normal(size=30_000)}, tmp_path)["target"]
    assert column.counts is None
    part = only(tmp_path / "x.parquet")
    assert (part.label, part.balance) == ("target", None)


def test_progress_is_told_as_it_goes(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "x.parquet")
    heard: list[int] = []
    inspect(tmp_path / "x.parquet", told=heard.append, rows=300)
    assert heard == [0, 300, 600, 900]
