"""The statistics in a manifest equal those of the data, independent of its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.core.types import Sparse
from echelon.data import write_shards
from echelon.data.shards.statistics import Moments


def figures(folder: Path, column: Any, pieces: int = 3) -> dict[str, Any]:
    parts = [{"x": part} for part in np.array_split(column, pieces)]
    return dict(write_shards(folder / "set", parts, overwrite=True).statistics["x"])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((), 0), ((5,), 0), ((3, 4, 4), (0, 2, 3)), ((4, 4), None), ((2, 3, 2, 2), None)],
)
def test_they_are_per_feature_per_channel_or_one(
    dtype: str, shape: tuple[int, ...], axes: Any, tmp_path: Path
) -> None:
    data = np.random.default_rng(1).uniform(0, 200, (50, *shape)).astype(dtype)
    found = figures(tmp_path, data)
    wide = data.astype(np.float64)
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(found[name], getattr(wide, name)(axis=axes), rtol=1e-10)


def test_a_small_spread_on_a_large_mean_is_not_lost(tmp_path: Path) -> None:
    data = 1e8 + np.random.default_rng(2).standard_normal(30_000)
    assert figures(tmp_path, data, 7)["std"] == pytest.approx(data.std(), rel=1e-6)


def test_missing_and_infinite_values_are_left_out() -> None:
    moments = Moments((2,))
    moments.add(np.array([[1.0, np.nan], [3.0, np.inf], [np.nan, -np.inf]]))
    moments.add(np.array([[5.0, np.nan]]))
    assert moments.mean.tolist() == [3.0, 0.0]
    assert moments.count.tolist() == [3.0, 0.0]
    assert moments.std[0] == pytest.approx(np.std([1, 3, 5]))
    assert moments.summary()["min"] == [1, None]


def test_few_different_integers_are_counted_and_many_are_not(tmp_path: Path) -> None:
    labels = np.array([2, 0, 2, 1, 2, 0])
    assert figures(tmp_path, labels)["counts"] == {"0": 2, "1": 1, "2": 3}
    assert "counts" not in figures(tmp_path, np.arange(5000))
    assert "counts" not in figures(tmp_path, np.arange(1100), pieces=2)
    assert "counts" not in figures(tmp_path, labels.astype(np.float32))


def test_lengths_of_sequences_texts_and_sparse_rows(tmp_path: Path) -> None:
    batch = {
        "words": [[1], [1, 2, 3], []],
        "text": ["a", "äöü", ""],
        "bag": Sparse(torch.arange(4), torch.ones(4), torch.tensor([0, 1, 4, 4]), 9),
    }
    found = write_shards(tmp_path / "set", [batch, batch]).statistics
    length = {"min": 0, "mean": pytest.approx(4 / 3), "max": 3}
    assert found["words"] == found["text"] == {"length": length}
    assert found["bag"] == {"nnz": 8, "length": length}


def test_bfloat16_counts_as_the_numbers_it_stands_for(tmp_path: Path) -> None:
    data = torch.tensor([1.0, 2.0, 6.0], dtype=torch.bfloat16)
    found = write_shards(tmp_path / "set", [{"x": data}]).statistics["x"]
    assert (found["min"], found["mean"], found["max"]) == (1, 3, 6)
