"""Dealing records out to balanced shards, class weights and copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.data.prepare.deal import shard_counts

from .dividing import copies, deal, weights


@given(
    rows=st.integers(20, 3000),
    shards=st.integers(1, 9),
    kinds=st.integers(1, 30),
    seed=st.integers(),
)
@settings(max_examples=20)
def test_shards_have_equal_counts_of_everything(
    rows: int, shards: int, kinds: int, seed: int
) -> None:
    rng = np.random.default_rng(abs(seed))
    splits = rng.choice(3, rows, p=[0.7, 0.2, 0.1]).astype(np.int8)
    classes = rng.zipf(1.5, rows) % kinds
    counts = shard_counts(np.bincount(splits, minlength=3).tolist(), shards)
    dealt = deal(splits, counts, seed, classes, rng.integers(1, 500, rows))
    for split, count in enumerate(counts):
        mine = splits == split
        for chosen in (mine, *(mine & (classes == kind) for kind in range(kinds))):
            found = np.bincount(dealt.shard[chosen], minlength=count)
            assert len(found) == count
            assert np.ptp(found) <= 1 if count else True
        for shard in range(count):
            places = dealt.place[mine & (dealt.shard == shard)]
            assert (np.sort(places) == np.arange(len(places))).all()


def test_sums_of_lengths_are_alike() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, 40_000).astype(np.int64)
    classes = rng.integers(0, 10, 40_000)
    dealt = deal(np.zeros(40_000, np.int8), [8, 0, 0], 0, classes, lengths, 5000)
    sums = np.bincount(dealt.shard, lengths)
    assert np.ptp(sums) < 2 * lengths.max()
    at_random = np.bincount(deal(np.zeros(40_000, np.int8), [8, 0, 0], 0, size=5000).shard, lengths)
    assert np.ptp(sums) < np.ptp(at_random) / 3


def test_a_regular_step_in_the_data_is_not_that_of_the_shards() -> None:
    hours = np.arange(24_000) % 24
    dealt = deal(np.zeros(24_000, np.int8), [8, 0, 0], 0)
    for shard in range(8):
        counts = np.bincount(hours[dealt.shard == shard], minlength=24)
        assert counts.min() > 80
        assert counts.max() < 175


def test_a_shard_is_shuffled() -> None:
    splits, classes = np.zeros(10_000, np.int8), np.repeat([0, 1], 5000)
    dealt = deal(splits, [4, 0, 0], 0, classes)
    mine = dealt.shard == 2
    in_order = classes[mine][np.argsort(dealt.place[mine])]
    assert 0.45 < in_order[: len(in_order) // 2].mean() < 0.55


def test_dealing_depends_on_the_seed() -> None:
    splits = np.zeros(10_000, np.int8)
    first, again, other = (deal(splits, [4, 0, 0], seed) for seed in (0, 0, 1))
    assert (first.shard == again.shard).all()
    assert (first.place == again.place).all()
    assert (first.place != other.place).mean() > 0.9


def test_parts_of_any_size_are_dealt_alike() -> None:
    classes = np.arange(600_000) % 3
    dealt = deal(np.zeros(600_000, np.int8), [7, 0, 0], 0, classes, size=400_000)
    for kind in range(3):
        assert np.ptp(np.bincount(dealt.shard[classes == kind])) <= 1


def test_more_shards_than_records_are_refused() -> None:
    with pytest.raises(DataError, match="3 records cannot be dealt out to 4 shards"):
        deal(np.zeros(3, np.int8), [4, 0, 0], 0)


def test_how_many_shards() -> None:
    assert shard_counts([100, 10, 0], shards=16) == [16, 10, 0]
    assert shard_counts([100, 10, 0], rows=30) == [4, 1, 0]


def test_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_sample_weight

    rng = np.random.default_rng(0)
    classes, splits = rng.zipf(2, 1000) % 5, rng.integers(0, 3, 1000).astype(np.int8)
    found = weights(classes, splits)
    train = splits == 0
    np.testing.assert_allclose(
        found[train], compute_sample_weight("balanced", classes[train]), 1e-6
    )
    assert (found[~train] == 1).all()


def test_every_class_of_train_is_written_as_often() -> None:
    classes = np.repeat([0, 1, 2], [600, 170, 3])
    splits = np.where(np.arange(773) % 4 == 3, 1, 0).astype(np.int8)
    found = copies(classes, splits, 0)
    train = splits == 0
    written = np.bincount(np.repeat(classes[train], found[train]))
    assert (written == written[0]).all()
    assert (found[classes == 0] == 1).all()
    assert (found[~train] == 1).all()
    for kind in (1, 2):
        assert np.ptp(found[train & (classes == kind)]) <= 1, "all about as often"
    assert (found != copies(classes, splits, 1)).any()
    assert copies(classes, splits, 0, at_most=5).max() == 5


def test_nothing_to_divide_is_no_trouble() -> None:
    empty, none = np.empty(0, np.int64), np.empty(0, np.int8)
    assert len(copies(empty, none, 0)) == len(weights(empty, none)) == 0
    assert len(deal(none, [0, 0, 0], 0, empty, empty).shard) == 0
