"""A value has the same hash on every machine, wherever it stands in a column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from echelon.data.hashing import LONG_VALUE, hashed

TEXTS = [
    "",
    "a",
    "a\0",
    "\0",
    "ab",
    "abcdefgh",
    "abcdefghi",
    "é" * 300,
    "x" * LONG_VALUE,
    "x" * 9000,
]


def test_a_text_has_the_same_hash_wherever_it_stands() -> None:
    whole = hashed(pa.array(TEXTS))
    assert len(set(whole.tolist())) == len(TEXTS)
    alone = [hashed(pa.array([text], pa.large_utf8()))[0] for text in TEXTS]
    assert whole.tolist() == alone
    turned = hashed(pa.array(["first", *TEXTS[::-1], "last"]).slice(1, len(TEXTS)))
    assert turned[::-1].tolist() == alone
    assert hashed(pa.array(["a" * n for n in range(200)] * 200))[-1] == hashed(
        pa.array(["a" * 199])
    )


def test_a_hash_is_the_same_on_every_machine() -> None:
    found = [int(hashed(pa.array([value]))[0]) for value in ("abc", 7, 2.5)]
    assert found == [17004067876659911664, 16184226688143867045, 18369869265329653772]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(np.arange(50_000)),
        pa.array(np.arange(50_000, dtype=np.float32)),
        pa.array(np.arange(50_000) * 86_400_000_000, pa.timestamp("us")),
        pa.array(np.arange(50_000, dtype=np.int32), pa.date32()),
        pa.array([f"{n}" for n in range(50_000)]),
    ],
    ids=lambda column: str(column.type),
)
def test_values_of_every_type_are_told_apart(column: pa.Array) -> None:
    assert len(np.unique(hashed(column))) == 50_000


def test_minus_zero_is_zero() -> None:
    minus, plus = hashed(pa.array([-0.0, 0.0])).tolist()
    assert minus == plus
