"""Features of tables end to end: shards hold what scikit-learn computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler, TargetEncoder

from echelon.core.types import Sparse
from echelon.data.prepare import Prepared, engine, prepare
from echelon.data.prepare.steps import Sparse as Rows
from echelon.data.shards import ShardSource

from .fitting import dense

WINE = load_wine()
NUMBERS = [f"n{at}" for at in range(13)]
TOWNS = np.random.default_rng(0).choice(["Asti", "Bari", "Como"], len(WINE.data))
FEATURES = [
    {"kind": "classes", "from": "label", "to": "y"},
    {"kind": "standardise", "from": NUMBERS, "to": "scaled"},
    {"kind": "bins", "from": "n0", "bins": 4, "to": "binned"},
    {"kind": "one_hot", "from": ["town", "binned"], "to": "hot"},
    {"kind": "one_hot", "from": "town", "to": "_sparse", "form": "sparse"},
    {"kind": "join", "from": ["scaled", "_sparse"], "to": "joined"},
    {"kind": "cross", "from": ["town", "binned"], "to": "_pair"},
    {"kind": "target", "from": ["town", "_pair"], "label": "n1", "smooth": 2.0, "to": "mean"},
    {"kind": "hashed", "from": ["town", "_pair"], "buckets": 100, "to": "buckets"},
    {"kind": "pca", "from": "scaled", "components": 3, "to": "turned"},
    {"kind": "svd", "from": "joined", "components": 2, "iterations": 2, "to": "factors"},
    {"kind": "select", "from": "scaled", "label": "label", "size": 4, "to": "best"},
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(engine, "SIZE", 4096)  # several blocks, from little data
    lines = [",".join(["id", *NUMBERS, "town", "label"])]
    for at, (row, town, label) in enumerate(zip(WINE.data, TOWNS, WINE.target, strict=True)):
        lines.append(",".join([str(at), *map(repr, row.tolist()), town, f"kind {label}"]))
    path = tmp_path / "wine.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "read": str(path),
        "split": {"by": "stratified", "column": "label", "train": 0.75, "test": 0.25},
        "features": FEATURES,
        "keep": ["id"],
        "write": {"folder": "one", "shards": 3},
    }


def gathered(done: Prepared, split: str) -> dict[str, Any]:
    source = ShardSource(done.path(split))
    batch = source.gather(torch.arange(len(source)))
    return {name: as_dense(column) for name, column in batch.items()}


def as_dense(column: Any) -> Any:
    if not isinstance(column, Sparse):
        return column.numpy()
    indices, values, offsets = (part.numpy() for part in column[:3])
    return dense(Rows(indices, values, offsets, column.width))


def test_shards_hold_what_scikit_learn_makes_of_train(recipe: dict[str, Any]) -> None:
    done = prepare(recipe, workers=1)
    train, test = gathered(done, "train"), gathered(done, "test")
    assert sorted(np.concatenate([train["id"], test["id"]])) == list(range(178))
    assert np.bincount(test["y"]).tolist() == [15, 17, 12], "a quarter of 59, 71 and 48"
    x, new = WINE.data[train["id"]], WINE.data[test["id"]]
    scaler = StandardScaler().fit(x)
    scaled = scaler.transform(new)
    np.testing.assert_allclose(test["scaled"], scaled, atol=1e-5)
    bins = KBinsDiscretizer(4, encode="ordinal", quantile_method="averaged_inverted_cdf")
    binned = bins.fit(x[:, :1]).transform(new[:, :1])
    assert (test["binned"] == binned[:, 0]).all()
    towns = TOWNS[train["id"], None].astype(object), TOWNS[test["id"], None].astype(object)
    hot = OneHotEncoder(sparse_output=False).fit(towns[0]).transform(towns[1])
    assert (test["hot"][:, :3] == hot).all()
    assert (test["hot"][:, 3:] == np.eye(4)[test["binned"]]).all()
    np.testing.assert_allclose(test["joined"], np.hstack([scaled, hot]), atol=1e-5)
    means = TargetEncoder(target_type="continuous", smooth=2.0).fit(towns[0], x[:, 1])
    np.testing.assert_allclose(test["mean"][:, 0], means.transform(towns[1])[:, 0], rtol=1e-5)
    assert len(np.unique(train["mean"][:, 0])) == 15, "three towns, five folds"
    turned = PCA(3, svd_solver="full").fit(scaler.transform(x)).transform(scaled)
    np.testing.assert_allclose(test["turned"], turned, atol=1e-4)
    assert test["best"].shape == (44, 4)
    assert "_pair" not in test
