"""Doubtful labels: those that a model disagrees with which has not seen the record.

Records are divided into folds by their text, so equal texts are always in the same fold. For every
fold a linear model over hashed words is trained on a sample of the other folds. It predicts the
labels of its own fold; a confident other label is noted. No record is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.hashing import fingerprints, hashes
from echelon.data.prepare.clean.duplicates import characters
from echelon.data.prepare.steps import Cleaned, Step, gaps, is_text
from echelon.data.prepare.text.tokenise import tokenise
from echelon.data.prepare.workdir import Learnt


class Noise(Step):
    """Report labels that are probably wrong, by the predictions of a model from the text."""

    kind: Literal["noise"] = "noise"
    label: str
    column: str
    """The column of text that the model predicts the label from."""
    sure: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """The probability of another label from which on a record is noted."""

    @property
    def looks(self) -> int:
        return 1

    def reads(self) -> list[str]:
        return [self.label, self.column]

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        if not is_text(names[self.column]):
            raise DataError(f"step noise: column {self.column!r} must be text to tell labels by")
        if pa.types.is_floating(names[self.label]):
            raise DataError(f"step noise: column {self.label!r} has numbers, not classes")
        return after

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        rows, order = self._known(block)
        rows = rows[np.argsort(order[rows], kind="stable")[:SAMPLE]]
        chosen = block.take(pa.array(np.sort(rows)))
        bag = bagged(chosen.column(self.column))
        return {
            "labels": _labels(chosen.column(self.label)),
            "order": order[np.sort(rows)],
            "buckets": bag.buckets,
            "offsets": bag.offsets,
        }

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        sample = Sample()
        for partial in partials:
            sample.add(partial)
        return sample.models(self.sure)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        if not learnt["classes"]:
            return Cleaned(block)
        rows, order = self._known(block)
        classes = np.array(learnt["classes"], object)
        labels = np.array(_labels(block.column(self.label)).fill_null("").to_pylist(), object)[rows]
        bag = bagged(block.column(self.column).take(pa.array(rows)))
        likely = judged(bag, order[rows] % np.uint64(FOLDS), learnt["weights"], learnt["bias"])
        best = likely.argmax(1)
        sure = likely[np.arange(len(rows)), best]
        other = np.isin(labels, classes) & (classes[best] != labels) & (sure >= self.sure)
        noted = [
            (
                int(rows[at]),
                f"label {labels[at]!r}, but by its text {classes[best[at]]!r} ({sure[at]:.2f})",
            )
            for at in np.flatnonzero(other).tolist()
        ]
        return Cleaned(block, counts={"suspected": len(noted)}, noted=noted)

    def _known(self, block: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the rows with a text and a label, and a hash of the text for all rows."""
        text = block.column(self.column)
        gone = gaps(text) | gaps(block.column(self.label))
        return np.flatnonzero(~gone), fingerprints([text])[:, 0]


def _labels(column: Any) -> Any:
    """Return labels of any type as text."""
    return column if pa.types.is_large_string(column.type) else column.cast(pa.large_utf8())


# Models that predict labels of records they have not seen

FOLDS = 4
SAMPLE = 40_000
"""Records that the models are trained on, at most. Each block contributes as many: with fewer, the
sample would depend on how the data is cut, and data of a single block would hardly be sampled."""
_WEIGHTS = 1 << 20
"""Weights of one model, at most: with more classes, words are hashed into fewer buckets."""
_FEWEST = 50
"""The smallest sample that models are trained on; with fewer records no label is noted."""
_EPOCHS = 5
_SHOWN = 10
"""Pairs of mixed-up classes in the report."""
_FAR = 50.0
"""Scores are clipped here: the probability is practically 1, and the exponential still finite."""
Floats = NDArray[np.float32]


class Sample:
    """The records to train on: those with the smallest hashes, in whichever order blocks come."""

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
        """Train a model for every fold on the other folds; return them and a report."""
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


def _fitted(
    bag: Bag, y: NDArray[np.int64], seen: NDArray[np.bool_], classes: int, width: int
) -> tuple[Floats, Floats]:
    """Train a one-against-rest model; return its weights [classes, width] and bias [classes]."""
    # Imported on use: the import takes a second, and few recipes need it.
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
    """Return how often the models agree with the labels of the sample, and the mixed-up classes."""
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


def judged(bag: Bag, fold: NDArray[np.uint64], weights: Floats, bias: Floats) -> Floats:
    """Return the chance of each class [rows, classes], by the model that has not seen the row."""
    rows = matrix(bag, weights.shape[2])
    out = np.empty((rows.shape[0], weights.shape[1]), np.float32)
    for one in range(len(weights)):
        mine = np.flatnonzero(fold == np.uint64(one))
        score = np.clip(rows[mine] @ weights[one].T + bias[one], -_FAR, _FAR)
        chance = 1 / (1 + np.exp(-score))
        out[mine] = chance / chance.sum(1, keepdims=True)
    return out


# Texts as rows of hashed words

BUCKETS = 1 << 16
_PAIR = key(0xBA6)
_IDEOGRAPHS = 0x2E80
"""From this code point on, text has no blanks between words: pairs of characters replace words."""


class Bag(NamedTuple):
    """Texts as bags of hashed words; row i has `buckets[offsets[i]:offsets[i + 1]]`."""

    buckets: NDArray[np.int32]
    offsets: NDArray[np.int64]


def bagged(text: Any) -> Bag:
    """Return the hashed words, and the hashed pairs of ideographs, of a column of text."""
    tokens = tokenise(text, "words")
    found, rows = hashes(tokens.terms)[tokens.codes], tokens.rows().astype(np.int64)
    points, of = characters(text.fill_null("").to_pylist())
    pair = np.flatnonzero((points[:-1] >= _IDEOGRAPHS) & (points[1:] >= _IDEOGRAPHS))
    if len(pair):
        both = points[pair].astype(np.uint64) << np.uint64(32) | points[pair + 1]
        found = np.concatenate([found, words(both, _PAIR)])
        rows = np.concatenate([rows, of[pair]])
        order = np.argsort(rows, kind="stable")
        found, rows = found[order], rows[order]
    offsets = np.searchsorted(rows, np.arange(len(text) + 1))
    return Bag((found % np.uint64(BUCKETS)).astype(np.int32), offsets)


def joined(rows: list[NDArray[np.int32]]) -> Bag:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Bag(np.concatenate(rows) if rows else np.zeros(0, np.int32), offsets)


def matrix(bag: Bag, width: int) -> Any:
    """Return a sparse matrix with rows of norm one; `width` is a power of two, at most BUCKETS."""
    from scipy.sparse import csr_array

    count = len(bag.offsets) - 1
    # scikit-learn does not support 64-bit offsets.
    parts = np.ones(len(bag.buckets), np.float32), bag.buckets & (width - 1)
    rows = csr_array((*parts, bag.offsets.astype(np.int32)), (count, width))
    rows.sum_duplicates()
    # The root of a word's share of the row: then the squares of a row add up to one.
    words = np.repeat(np.diff(bag.offsets), np.diff(rows.indptr))
    rows.data = np.sqrt(rows.data / words, dtype=np.float32)
    return rows
