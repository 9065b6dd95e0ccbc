"""Cleaning steps that check and change values: missing, range, types, length, text."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.core.config.loading import checked
from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare.clean.values import Median
from echelon.data.prepare.recipe import STEPS, step_kind
from echelon.data.prepare.steps import Cleaned, Step
from echelon.data.prepare.workdir import pack, unpack


def step(kind: str, **settings: Any) -> Step:
    return checked(step_kind(kind), {"kind": kind, **settings})


def batch(**columns: Any) -> Any:
    return pa.record_batch(
        {
            name: values
            if isinstance(values, pa.Array)
            else pa.array(values, pa.large_utf8() if isinstance(values[0], str) else None)
            for name, values in columns.items()
        }
    )


def run(one: Step, *blocks: Any, scratch: Path | None = None) -> list[Cleaned]:
    """Run a step as the engine does: all passes of `look` and `learn`, then `clean`."""
    after = one.check(dict(zip(blocks[0].schema.names, blocks[0].schema.types, strict=True)))
    learnt: dict[str, Any] = {}
    for at in range(one.looks):
        partials = (unpack(pack(one.look(at, block, learnt))) for block in blocks)
        learnt = unpack(pack(one.learn(at, partials, learnt, scratch or Path())))
    done = [one.clean(block, learnt) for block in blocks]
    for block, result in zip(blocks, done, strict=True):
        assert result.block.num_rows + len(result.dropped) == block.num_rows
        assert dict(zip(result.block.schema.names, result.block.schema.types, strict=True)) == after
        result.block.validate(full=True)
    return done


def column(results: Sequence[Cleaned], name: str) -> list[Any]:
    return [value for result in results for value in result.block.column(name).to_pylist()]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"html": True}, "<p>a &amp; b<br/>c</p> 1 < 2", "a & b c 1 < 2"),
        ({"html": True}, "x<script>if (a<b) {}</script>y<!-- <b> -->z", "x y z"),
        ({"html": True}, "&lt;b&gt; &#39;&#x27; &unknown; &nbsp;.", "<b> '' &unknown; ."),
        ({"unicode": "NFC"}, "e\u0301", "é"),
        ({"unicode": "NFKC"}, "ﬁ ① Ａ", "fi 1 A"),
        ({"unicode": None}, "e\u0301", "e\u0301"),
        ({"width": True}, "ＡＢＣ！～　１２３，中文", "ABC!~ 123,中文"),
        ({"width": True, "space": False}, "\u3000", " "),
        ({"space": True}, " a\t\tb\u00a0\n\x00c ", "a b c"),
        ({"space": False}, " a  b ", " a  b "),
        ({"lower": True}, "ÀB", "àb"),
    ],
)
def test_text_is_normalised(settings: dict[str, Any], before: str, after: str) -> None:
    block = batch(t=pa.array([before, None, "", before], pa.large_utf8()))
    (done,) = run(step("text", column="t", **settings), block)
    assert done.block.column("t").to_pylist() == [after, None, "", after]
    assert done.counts["changed"] == 2 * (before != after)


@settings(max_examples=40)
@given(texts=st.lists(st.text(st.sampled_from("aＡ！～\u3000中é\uff00\uff5f\ufeff")), max_size=6))
def test_width_is_changed_in_every_text_and_nothing_else(texts: list[str]) -> None:
    table = {0x3000: " ", **{0xFF00 + n: chr(0x20 + n) for n in range(1, 0x5F)}}
    whole = batch(t=pa.array(["ｘ", *texts], pa.large_utf8()))
    one = step("text", column="t", width=True, unicode=None, space=False)
    found = one.clean(whole.slice(1), {}).block.column("t").to_pylist()
    assert found == [text.translate(table) for text in texts]


def test_texts_too_short_or_too_long_go_or_are_cut() -> None:
    block = batch(t=pa.array(["", "ab", "éé中", None, "abcde"], pa.large_utf8()))
    (done,) = run(step("length", column="t", min=1, max=3), block)
    assert done.block.column("t").to_pylist() == ["ab", "éé中", None]
    assert done.dropped == [
        (0, "'t' has a length of 0: fewer than 1"),
        (4, "'t' has a length of 5: more than 3"),
    ]
    (cut,) = run(step("length", column="t", max=2, too_long="cut"), block)
    assert cut.block.column("t").to_pylist() == ["", "ab", "éé", None, "ab"]
    assert cut.counts == {"cut": 2}


def test_lists_have_lengths_too() -> None:
    block = batch(v=pa.array([[1, 2, 3], [], [4]], pa.large_list(pa.int64())))
    (done,) = run(step("length", column="v", min=1, max=2, too_long="cut"), block)
    assert done.block.column("v").to_pylist() == [[1, 2], [4]]


def test_records_with_a_gap_go() -> None:
    block = batch(a=pa.array([1.0, None, float("nan"), 4.0]), t=["x", "y", "z", ""])
    (done,) = run(step("missing", column=["a", "t"]), block)
    assert done.block.to_pydict() == {"a": [1.0], "t": ["x"]}
    assert done.dropped == [(1, "'a' is missing"), (2, "'a' is missing"), (3, "'t' is missing")]


def test_a_constant_stands_in_and_an_indicator_says_where() -> None:
    block = batch(a=pa.array([1, None, 3]))
    (done,) = run(step("missing", column="a", how="constant", value=0, indicator=True), block)
    assert done.block.to_pydict() == {"a": [1, 0, 3], "a_missing": [False, True, False]}
    assert done.counts == {"filled": 1}
    (text,) = run(step("missing", column="t", how="constant", value="?"), batch(t=["", "x"]))
    assert text.block.column("t").to_pylist() == ["?", "x"]


def test_whole_numbers_become_floats_where_a_fraction_stands_in() -> None:
    blocks = [batch(a=pa.array([1, None], pa.int32())), batch(a=pa.array([3], pa.int32()))]
    done = run(step("missing", column="a", how="constant", value=7.5), *blocks)
    assert column(done, "a") == [1.0, 7.5, 3.0]
    assert {one.block.schema.field("a").type for one in done} == {pa.float64()}
    whole = run(step("missing", column="a", how="constant", value=7.0), *blocks)
    assert column(whole, "a") == [1, 7, 3]
    assert {one.block.schema.field("a").type for one in whole} == {pa.int32()}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("abc", pa.int64()),
        (True, pa.int64()),
        (-1, pa.uint8()),
        (300, pa.int8()),
        (1e30, pa.int64()),
        (7.5, pa.timestamp("s")),
        (1e300, pa.float32()),
    ],
)
def test_a_constant_that_its_column_cannot_hold_is_refused(value: Any, kind: pa.DataType) -> None:
    one = step("missing", column="a", how="constant", value=value)
    with pytest.raises(DataError, match=r"is not of type .*, as column 'a' is"):
        one.check({"a": kind})


@pytest.mark.parametrize("how", ["mean", "median"])
@settings(max_examples=15)
@given(
    blocks=st.lists(
        st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=6), min_size=1, max_size=4
    )
)
def test_a_mean_or_median_of_all_blocks_stands_in(how: str, blocks: list[list[Any]]) -> None:
    values = [value for block in blocks for value in block if value is not None]
    given = [batch(a=pa.array(block, pa.float64())) for block in blocks]
    one = step("missing", column="a", how=how)
    with tempfile.TemporaryDirectory() as folder:
        if not values:
            with pytest.raises(DataError, match=f"column 'a' has no value to take a {how} of"):
                run(one, *given, scratch=Path(folder))
            return
        done = run(one, *given, scratch=Path(folder))
    known = statistics.fmean(values) if how == "mean" else statistics.median(values)
    expected = [known if value is None else value for block in blocks for value in block]
    assert column(done, "a") == pytest.approx(expected, rel=1e-9, abs=1e-6)


@settings(max_examples=40)
@given(values=st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=30))
@example(values=[1.0, 9007200328482816.0])
def test_the_median_of_a_file_is_exact(values: list[float]) -> None:
    values = [value for value in values if abs(value) != float("inf")] or [0.0]
    with tempfile.TemporaryDirectory() as folder:
        median = Median(Path(folder) / "m")
        for part in np.array_split(np.array(values), 3):
            median.add(part)
        assert median.value() == statistics.median(values)


def test_the_median_of_huge_numbers_is_no_larger_than_they(tmp_path: Path) -> None:
    median = Median(tmp_path / "m")
    median.add(np.array([1.5e308, 1.7e308]))
    assert median.value() == 1.6e308


def test_the_median_of_whole_numbers_becomes_a_float(tmp_path: Path) -> None:
    done = run(
        step("missing", column="a", how="median"),
        batch(a=pa.array([1, None], pa.int32())),
        batch(a=pa.array([4], pa.int32())),
        scratch=tmp_path,
    )
    assert column(done, "a") == [1.0, 2.5, 4.0]


@pytest.mark.parametrize("how", ["mean", "median"])
def test_gaps_among_numbers_that_no_float_is_are_filled(how: str, tmp_path: Path) -> None:
    large = 2**53
    block = batch(a=pa.array([large + 1, None, large + 3], pa.int64()))
    done = run(step("missing", column="a", how=how), block, scratch=tmp_path)
    assert column(done, "a") == [float(large), float(large + 2), float(large + 4)]


def test_numbers_out_of_range_go_are_moved_or_are_missing() -> None:
    block = batch(a=pa.array([-1, 5, None, 130], pa.int64()))
    (gone,) = run(step("range", column="a", min=0, max=120), block)
    assert gone.block.column("a").to_pylist() == [5, None]
    assert gone.dropped == [(0, "'a' is -1: below 0"), (3, "'a' is 130: above 120")]
    (moved,) = run(step("range", column="a", min=0.5, max=120.5, how="clip"), block)
    assert moved.block.column("a").to_pylist() == [1, 5, None, 120]
    assert moved.counts == {"changed": 2}
    (empty,) = run(step("range", column="a", max=120, how="missing"), block)
    assert empty.block.column("a").to_pylist() == [-1, 5, None, None]


@pytest.mark.parametrize(
    ("limits", "kind", "message"),
    [
        ({"min": 1000}, pa.int8(), "min = 1000: column 'a' is of type int8, from -128 to 127"),
        ({"max": -1}, pa.uint8(), "max = -1: column 'a' is of type uint8, from 0 to 255"),
        ({"min": 1e30}, pa.int64(), "is of type int64"),
    ],
)
def test_numbers_are_not_moved_to_a_limit_that_their_type_lacks(
    limits: dict[str, float], kind: Any, message: str
) -> None:
    block = batch(a=pa.array([1, 2], kind))
    with pytest.raises(DataError, match=rf"step range: .*{message}"):
        run(step("range", column="a", how="clip", **limits), block)
    (gone,) = run(step("range", column="a", **limits), block)
    assert len(gone.dropped) == 2
    (moved,) = run(step("range", column="a", how="clip", min=-1000, max=1e30), block)
    assert moved.block.column("a").to_pylist() == [1, 2]


def test_values_of_a_wrong_type_go_or_are_missing() -> None:
    block = batch(a=["1", " 2 ", "x", "", "2.5"])
    (gone,) = run(step("types", column="a", to="int64"), block)
    assert gone.block.column("a").to_pylist() == [1, 2, None]
    assert gone.dropped == [
        (2, "'a' is 'x': not of type int64"),
        (4, "'a' is '2.5': not of type int64"),
    ]
    (empty,) = run(step("types", column="a", to="float64", how="missing"), block)
    assert empty.block.column("a").to_pylist() == [1, 2, None, None, 2.5]
    assert empty.counts == {"emptied": 1}


def test_a_block_without_rows_stays_one() -> None:
    block = batch(t=["x"], a=[1.0]).slice(1)
    settings: dict[str, dict[str, Any]] = {
        "text": {"column": "t", "width": True, "html": True},
        "length": {"column": "t", "min": 1},
        "missing": {"column": "a"},
        "range": {"column": "a", "min": 0},
        "types": {"column": "t", "to": "int64"},
    }
    for kind, values in settings.items():
        (done,) = run(step(kind, **values), block)
        assert done.block.num_rows == 0


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("text", {"column": "a"}, "step text: column 'a' is of type int64: it must be text"),
        ("text", {"column": "z"}, "step text: column 'z' is unknown"),
        ("length", {"column": "a", "min": 1}, "it must be text or a list"),
        ("missing", {"column": "t", "how": "mean"}, "it must be numbers, for a mean or a median"),
        (
            "missing",
            {"column": "a", "how": "constant", "value": "x"},
            "value 'x' is not of type int64, as column 'a' is",
        ),
        (
            "missing",
            {"column": ["a", "a_missing"], "how": "constant", "value": 0, "indicator": True},
            "there is a column 'a_missing' already",
        ),
        ("range", {"column": "t", "min": 0}, "it must be numbers"),
        ("types", {"column": "t", "to": "number"}, "step types: to = 'number': not a type"),
        ("duplicates", {"columns": ["z"]}, "step duplicates: column 'z' is unknown"),
        ("duplicates", {"columns": ["a"], "near": 0.8}, "near compares texts"),
        ("noise", {"label": "a", "column": "a"}, "column 'a' must be text to tell labels by"),
        ("noise", {"label": "f", "column": "t"}, "column 'f' has numbers, not classes"),
    ],
)
def test_a_step_refuses_columns_it_cannot_work_on(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    names = {"a": pa.int64(), "t": pa.large_utf8(), "f": pa.float64(), "a_missing": pa.int64()}
    with pytest.raises(DataError, match=message):
        step(kind, **settings).check(names)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("length", {"column": "t"}, "set min, max or both"),
        ("length", {"column": "t", "min": 3, "max": 2}, "min 3 is above max 2"),
        ("range", {"column": "a"}, "set min, max or both"),
        ("range", {"column": "a", "min": 3, "max": 2}, "min 3.0 is above max 2.0"),
        ("missing", {"column": "a", "how": "constant"}, "how: constant needs a value"),
        ("missing", {"column": "a", "value": 3}, "how: drop takes no value"),
        ("missing", {"column": "a", "indicator": True}, "an indicator of records that are dropped"),
        ("duplicates", {"near": 1.5}, "near"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        step(kind, **settings)


def test_an_unknown_kind_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="kind of cleaning 'txt' is unknown; did you mean 'text'"):
        step_kind("txt")
    assert all(issubclass(step_kind(kind), Step) for kind in STEPS)
