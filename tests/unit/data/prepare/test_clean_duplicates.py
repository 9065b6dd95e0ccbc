"""Exact and near duplicates over many blocks."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.hashing import LONG_ROW, fingerprints
from echelon.data.prepare.clean import duplicates
from echelon.data.prepare.clean.duplicates import Duplicates
from echelon.data.prepare.workdir import pack, unpack

CHINESE = "数据的准备是训练的第一步，没有干净的数据就没有好的模型，所以每一条记录都要检查清楚再用"
WORDS = [f"{a}{b}{c}" for a in "bdfglmprst" for b in "aeiou" for c in ("n", "rk", "ssel", "th")]


def sentence(lots: random.Random, words: int = 40) -> str:
    return " ".join(lots.choices(WORDS, k=words))


def edited(lots: random.Random, text: str, changes: int) -> str:
    words = text.split()
    for at in lots.sample(range(len(words)), changes):
        words[at] = "CHANGED"
    return " ".join(words)


def found(step: Duplicates, rows: list[dict[str, Any]], size: int = 7) -> list[int]:
    """Return the record that each one repeats, or −1, from blocks of this size."""
    whole = pa.RecordBatch.from_pylist(rows)
    blocks = [whole.slice(start, size) for start in range(0, len(rows), size)]
    with tempfile.TemporaryDirectory() as folder:
        keys = (unpack(pack(step.hashes(block))) for block in blocks)
        return [int(of) for of in step.duplicates(keys, Path(folder) / "scratch")]


def firsts(rows: list[Any]) -> list[int]:
    seen: dict[Any, int] = {}
    return [-1 if seen.setdefault(row, at) == at else seen[row] for at, row in enumerate(rows)]


@pytest.mark.parametrize("part", [4, 2_000_000])
@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.text("ab\x1f1", max_size=3), st.none() | st.integers(0, 2), st.booleans()
        ),
        max_size=40,
    ),
    size=st.integers(1, 20),
)
def test_the_first_of_equal_records_stays(part: int, rows: list[Any], size: int) -> None:
    plain = [dict(zip(("t", "n", "b"), row, strict=True)) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "PART", part)
        if rows:
            assert found(Duplicates(), plain, size) == firsts(rows)
            assert found(Duplicates(columns=("n",)), plain, size) == firsts([r[1] for r in rows])


def test_records_that_differ_have_different_fingerprints() -> None:
    lots = random.Random(0)
    texts = ["", "\0", "\0\0", *(sentence(lots, n % 60) + str(n) for n in range(4000))]
    texts += ["x" * LONG_ROW, "x" * (LONG_ROW + 1), "x" * (LONG_ROW + 2)]
    found = fingerprints([pa.array(texts, pa.large_utf8())])
    assert len({tuple(row) for row in found.tolist()}) == len(texts)
    again = fingerprints([pa.array(["before", *texts], pa.large_utf8()).slice(1)])
    assert (found == again).all()


def test_cells_of_any_type_have_fingerprints() -> None:
    rows = pa.table(
        {
            "f": [0.0, -0.0, float("nan"), float("nan")],
            "l": [[1], [1], [2], [2]],
            "x": pa.array([b"a", b"a", None, None], pa.large_binary()),
        }
    )
    found = fingerprints([column.combine_chunks() for column in rows.columns])
    assert (found[0] == found[1]).all()
    assert (found[2] == found[3]).all()
    assert (found[0] != found[2]).any()


def test_near_duplicates_go_and_others_stay() -> None:
    lots = random.Random(1)
    texts = [sentence(lots) for _ in range(60)]
    texts += [edited(lots, text, 1) for text in texts[:30]]
    texts += [edited(lots, text, 20) for text in texts[30:60]]
    texts += [texts[0].upper().replace(" ", "\n  "), "", "", CHINESE, CHINESE + "。"]
    of = found(Duplicates(columns=("t",), near=0.8), [{"t": text} for text in texts], 17)
    assert of[:60] == [-1] * 60
    assert of[60:90] == list(range(30))
    assert of[90:120] == [-1] * 30
    assert of[120:] == [0, -1, 121, -1, 123]


@pytest.mark.parametrize("part", [16, 2_000_000])
def test_a_chain_of_near_duplicates_ends_at_its_first(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "PART", part)
    lots = random.Random(2)
    chain = [sentence(lots)]
    while len(chain) < 6:
        chain.append(edited(lots, chain[-1], 1))
    texts = [sentence(lots), *chain, sentence(lots), *chain]
    of = found(Duplicates(near=0.8), [{"t": text} for text in texts], 5)
    assert of == [-1, -1, 1, 1, 1, 1, 1, -1, 1, 1, 1, 1, 1, 1]


def test_near_wants_the_other_columns_to_be_equal() -> None:
    text = sentence(random.Random(3))
    rows = [{"t": text, "n": 1}, {"t": text + ".", "n": 2}, {"t": text + "!", "n": 1}]
    assert found(Duplicates(near=0.8), rows) == [-1, -1, 0]
    two = [{"t": text, "u": text}, {"t": text, "u": "other"}, {"t": text, "u": text + "."}]
    assert found(Duplicates(near=0.8), two)[2] == 0


def test_the_order_of_blocks_is_the_order_of_records_whatever_their_size() -> None:
    lots = random.Random(4)
    texts = [sentence(lots, 12) for _ in range(40)]
    rows = [{"t": edited(lots, lots.choice(texts), lots.randrange(2))} for _ in range(150)]
    step = Duplicates(near=0.7)
    assert found(step, rows, 11) == found(step, rows, 150)


def test_marks_say_how_much_texts_share() -> None:
    lots = random.Random(5)
    texts = [sentence(lots) for _ in range(100)]
    others = [edited(lots, text, at % 12) for at, text in enumerate(texts)]
    _, left = duplicates.sketched(pa.array(texts, pa.large_utf8()), 0.8)
    _, right = duplicates.sketched(pa.array(others, pa.large_utf8()), 0.8)
    known = [_shared(a, b) for a, b in zip(texts, others, strict=True)]
    assert np.abs(duplicates.alike(left, right) - known).mean() < 0.04


def _shared(a: str, b: str) -> float:
    left, right = (
        {(text.lower() + "\0" * 5)[at : at + 5] for at in range(len(text))} for text in (a, b)
    )
    return len(left & right) / len(left | right)


def test_bands_bring_near_texts_together() -> None:
    for near in (0.5, 0.7, 0.8, 0.9, 0.95):
        bands, rows = duplicates.banding(near)
        assert bands * rows <= duplicates.BINS
        assert 1 - (1 - near**rows) ** bands >= 0.98
    assert duplicates.banding(0.3) == (64, 1)


def test_a_block_without_rows_is_compared_like_others(tmp_path: Path) -> None:
    lots = random.Random(6)
    texts = pa.array([sentence(lots, 8) for _ in range(200)], pa.large_utf8())
    whole = pa.record_batch({"t": texts})
    none = whole.slice(0, 0)
    for compare in (Duplicates(columns=("t",)), Duplicates(columns=("t",), near=0.8)):
        keys = [compare.hashes(one) for one in (none, whole, none, whole)]
        of = compare.duplicates(keys, tmp_path / "scratch")
        assert of.tolist() == [-1] * 200 + list(range(200))
        assert len(compare.duplicates([], tmp_path / "empty")) == 0
