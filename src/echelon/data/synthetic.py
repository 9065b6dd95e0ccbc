"""Data sets that need no file: a synthetic click log, and those that come with scikit-learn.

The best possible AUC of the click log is known. Every field's ids are drawn from a skewed (Zipf)
distribution. A record's true logit is the sum of a hidden effect per id, of products of hidden
factors of neighboring fields, and of effects of the numbers; the record is a click with that
probability. No model can rank better than the true probability does, so its AUC on the held-out
records is the goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.shards.encode import dense_array

# The click log

Array = np.ndarray[Any, Any]
_FACTORS = 4


@dataclass(frozen=True, slots=True)
class ClickOptions:
    """Options of the click log, `data.options` in a job."""

    rows: int = 100_000
    fields: int = 8
    """Categorical fields."""
    vocabulary: int = 1000
    """Different ids of a field."""
    numbers: int = 4
    """Numeric fields."""
    skew: float = 1.1
    """Exponent of the Zipf distribution: how rare the rare ids are."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"rows": 100, "fields": 1, "vocabulary": 2, "numbers": 1, "skew": 0, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            kinds = (int, float) if name == "skew" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool) or value < low:
                raise DataError(f"data.options.{name} is {value!r}: it must be at least {low}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> ClickOptions:
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise DataError(unknown("option of data set 'clicks'", name, known))
        return cls(**options)


def make_clicks(options: ClickOptions) -> Any:
    """Return a table with `dense` [numbers], `ids` [fields] (from 1 on), `y` and `chance`.

    `chance` is the true probability of a click.
    """
    random = np.random.default_rng([0xC11C, options.seed])
    ids = _draw_ids(random, options)
    numbers = random.standard_normal((options.rows, options.numbers), np.float32)
    logit = _effects(random, ids, options) + _pairs(random, ids, options)
    logit += _of_numbers(random, numbers)
    chance = 1 / (1 + np.exp(-(logit - np.quantile(logit, 0.75))))
    y = random.random(options.rows) < chance
    return pa.table(
        {
            "dense": dense_array(numbers),
            "ids": dense_array(ids + 1),
            "y": pa.array(y.astype(np.float32)),
            "chance": pa.array(chance),
        }
    )


def _draw_ids(random: np.random.Generator, options: ClickOptions) -> Array:
    weights = 1 / np.arange(1, options.vocabulary + 1) ** options.skew
    bounds = np.cumsum(weights / weights.sum())
    drawn = random.random((options.rows, options.fields))
    return np.minimum(np.searchsorted(bounds, drawn), options.vocabulary - 1)


def _effects(random: np.random.Generator, ids: Array, options: ClickOptions) -> Array:
    hidden = random.standard_normal((options.fields, options.vocabulary))
    chosen = hidden[np.arange(options.fields), ids]
    return np.asarray(chosen.sum(1) / np.sqrt(options.fields))


def _pairs(random: np.random.Generator, ids: Array, options: ClickOptions) -> Array:
    """Return the joint effects of neighboring fields, which no sum over single fields can model."""
    hidden = random.standard_normal((options.fields, options.vocabulary, _FACTORS))
    total = np.zeros(options.rows)
    for field in range(options.fields - 1):
        left, right = hidden[field, ids[:, field]], hidden[field + 1, ids[:, field + 1]]
        total += np.einsum("nf,nf->n", left, right)
    return np.asarray(total / np.sqrt(_FACTORS * max(1, options.fields - 1)))


def _of_numbers(random: np.random.Generator, numbers: Array) -> Array:
    straight, bent = random.standard_normal((2, numbers.shape[1]))
    effect = numbers @ straight + np.square(numbers) @ bent / 2
    return np.asarray(effect / np.sqrt(2 * numbers.shape[1]), np.float64)


def auc(scores: Array, clicked: Array) -> float:
    """Return the probability that a click is ranked above a non-click; equal scores count half."""
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.empty(len(scores))
    ranks[order] = np.repeat(first + (counts + 1) / 2, counts)
    positive = clicked > 0.5
    wins = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(wins / (positive.sum() * (~positive).sum()))


# Data sets that come with scikit-learn

SHIPPED = ("breast_cancer", "diabetes", "digits", "wine")


def load_shipped(name: str, options: Mapping[str, Any] | None = None) -> tuple[Any, list[str]]:
    """Return a table and the names of its classes (none for a regression target).

    The columns are the features by name, or `x` [8, 8] for images, and `target`.
    """
    if name == "clicks":
        raise DataError("data set 'clicks' holds categories: it is for the task 'click_rate'")
    if name not in SHIPPED:
        raise DataError(unknown("data.name", name, (*SHIPPED, "clicks")))
    if options:
        raise DataError(f"data set {name!r} takes no options; these were given: {list(options)}")
    # Imported on use, because scikit-learn takes most of a second to import.
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    if name == "digits":
        columns = {"x": dense_array(found.images.astype(np.float32))}
    else:
        features = np.asarray(found.data, np.float32)
        columns = {
            str(feature): pa.array(features[:, number])
            for number, feature in enumerate(found.feature_names)
        }
    table = pa.table({**columns, "target": pa.array(found.target)})
    return table, [str(label) for label in getattr(found, "target_names", ())]
