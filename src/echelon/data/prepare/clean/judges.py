"""Models that tell labels of records they have not seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.clean.bag import BUCKETS, Bag, joined, matrix
from echelon.data.prepare.learnt import Learnt

FOLDS = 4
SAMPLE = 40_000
"""Records that the models are trained on, at most. A block hands over as many: with fewer, what
the models see would hang on how the data is cut, and data of one block would hardly be seen."""
_WEIGHTS = 1 << 20
"""Weights of one model, at most: the more classes, the fewer buckets words are hashed to."""
_FEWEST = 50
"""Records that something can be told from, at least."""
_EPOCHS = 5
_SHOWN = 10
_FAR = 50.0
"""A score beyond it is as good as certain; its exponential is still a number."""

Floats = NDArray[np.float32]


class Sample:
    """Records to train on: those with the smallest numbers, so any order of blocks gives them."""

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._rows: list[NDArray[np.int32]] = []
        self._order: list[int] = []

    def add(self, partial: Learnt) -> None:
        self._labels += partial["labels"].to_pylist()
        self._order += partial["order"].tolist()
        self._rows += np.split(partial["buckets"], partial["offsets"][1:-1])
        if len(self._order) > 2 * SAMPLE:
            self._keep(SAMPLE)

    def _keep(self, count: int) -> None:
        best = np.argsort(np.array(self._order, np.uint64), kind="stable")[:count].tolist()
        self._labels = [self._labels[row] for row in best]
        self._rows = [self._rows[row] for row in best]
        self._order = [self._order[row] for row in best]

    def models(self, sure: float) -> Learnt:
        """A model for every fold, trained on the others, and what they say of the sample."""
        self._keep(SAMPLE)
        classes, y = np.unique(np.array(self._labels, object), return_inverse=True)
        if len(y) < _FEWEST or len(classes) < 2:
            return {"classes": [], "records": len(y)}
        width = min(BUCKETS, 1 << max(8, (_WEIGHTS // len(classes)).bit_length() - 1))
        bag = joined(self._rows)
        fold = np.array(self._order, np.uint64) % np.uint64(FOLDS)
        fitted = [_fitted(bag, y, fold != one, len(classes), width) for one in range(FOLDS)]
        weights, bias = (np.stack(part) for part in zip(*fitted, strict=True))
        likely = judged(bag, fold, weights, bias)
        return {
            "classes": classes.tolist(),
            "weights": weights,
            "bias": bias,
            **_report(classes, y, likely, sure),
        }


def judged(bag: Bag, fold: NDArray[np.uint64], weights: Floats, bias: Floats) -> Floats:
    """How likely each class is for each record, by the model that has not seen its fold."""
    rows = matrix(bag, weights.shape[2])
    out = np.empty((rows.shape[0], weights.shape[1]), np.float32)
    for one in range(len(weights)):
        mine = np.flatnonzero(fold == np.uint64(one))
        score = np.clip(rows[mine] @ weights[one].T + bias[one], -_FAR, _FAR)
        chance = 1 / (1 + np.exp(-score))
        out[mine] = chance / chance.sum(1, keepdims=True)
    return out


def _fitted(
    bag: Bag, y: NDArray[np.int64], seen: NDArray[np.bool_], classes: int, width: int
) -> tuple[Floats, Floats]:
    """Weights [classes, width] and bias [classes] of a model, one class against the others each."""
    # Imported on use: it takes a second, and few recipes ask for it.
    from sklearn.linear_model import SGDClassifier

    weights = np.zeros((classes, width), np.float32)
    bias = np.full(classes, -_FAR, np.float32)
    present = np.unique(y[seen])
    if len(present) < 2:
        bias[present] = 0
        return weights, bias
    model = SGDClassifier(
        loss="log_loss", alpha=1e-5, max_iter=_EPOCHS, tol=None, random_state=0, average=True
    )
    model.fit(matrix(bag, width)[np.flatnonzero(seen)], y[seen])
    one_sided = len(present) == 2
    weights[present] = [-model.coef_[0], model.coef_[0]] if one_sided else model.coef_
    bias[present] = [-model.intercept_[0], model.intercept_[0]] if one_sided else model.intercept_
    return weights, bias


def _report(classes: Any, y: NDArray[np.int64], likely: Floats, sure: float) -> dict[str, Any]:
    """What was found in the sample: how often the models agree, and which classes are mixed up."""
    best = likely.argmax(1)
    suspect = (best != y) & (likely.max(1) >= sure)
    mixed = Counter(sorted(zip(y[suspect].tolist(), best[suspect].tolist(), strict=True)))
    return {
        "records": len(y),
        "agreement": float((best == y).mean()),
        "suspected": float(suspect.mean()),
        "mixed_up": [
            {"label": str(classes[a]), "text": str(classes[b]), "records": count}
            for (a, b), count in mixed.most_common(_SHOWN)
        ],
    }
