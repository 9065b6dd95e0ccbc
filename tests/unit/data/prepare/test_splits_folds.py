"""Cross-validation: dividing records among folds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.data.prepare.ranking import FREE, TEST

from .dividing import divide, fold


def in_test(found: list[Any]) -> Any:
    """Return, per fold and record, whether it is in the test."""
    return np.stack([one == TEST for one in found])


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    folds=st.integers(2, 10),
    seed=st.integers(0, 2**70),
)
@settings(max_examples=40)
def test_folds_differ_by_one_record_in_each_class(counts: list[int], folds: int, seed: int) -> None:
    classes = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    if len(classes) < folds:
        return
    tested = in_test(fold("stratified", folds, len(classes), seed, classes, size=31))
    assert (tested.sum(0) == 1).all()
    assert np.ptp(tested.sum(1)) <= 1
    for label in range(len(counts)):
        assert np.ptp(tested[:, classes == label].sum(1)) <= 1


def test_folds_of_a_ratio_are_drawn_by_the_seed_alone() -> None:
    first, other = (in_test(fold("ratio", 10, 5003, seed)) for seed in (1, 2))
    assert (first.sum(0) == 1).all()
    assert sorted(set(first.sum(1).tolist())) == [500, 501]
    assert 0.05 < (first & other).any(0).mean() < 0.15  # of two draws independent of each other
    assert (in_test(fold("ratio", 10, 5003, 1, size=1 << 15)) == first).all()
    assert abs(np.histogram(np.flatnonzero(first[3]), 5, (0, 5003))[0] - 100).max() < 40


@given(seed=st.integers(0, 1000), folds=st.integers(2, 7))
@settings(max_examples=30)
def test_a_group_is_in_one_fold(seed: int, folds: int) -> None:
    keys = np.random.default_rng(seed).zipf(1.5, 2000) % 50
    if len(np.unique(keys)) < folds:
        return
    tested = in_test(fold("group", folds, len(keys), seed, keys))
    assert (tested.sum(0) == 1).all()
    assert (tested.sum(1) > 0).all()
    for key in np.unique(keys):
        assert (tested[:, keys == key].any(1).sum(), tested[:, keys == key].all(1).sum()) == (1, 1)


def test_even_groups_make_even_folds() -> None:
    tested = in_test(fold("group", 7, 7000, 0, np.arange(7000) % 350))
    assert (tested.sum(1) == 1000).all()


def test_records_with_a_split_are_in_no_fold() -> None:
    own = np.where(np.arange(1000) < 200, 0, FREE).astype(np.int8)
    found = fold("ratio", 5, 1000, 0, given=own)
    assert all((one[:200] == 0).all() for one in found)
    assert (in_test(found)[:, 200:].sum(1) == 160).all()
    keys = np.arange(1000) % 50
    own = np.where(keys == 7, 1, FREE).astype(np.int8)
    own[57:] = FREE  # its group stays with record 7
    tested = in_test(fold("group", 5, 1000, 0, keys, own))
    assert (tested.sum(0) == (keys != 7)).all()


def test_the_rest_of_a_fold_is_divided_as_ever() -> None:
    classes = np.arange(1000) % 4
    marked = fold("stratified", 10, 1000, 0, classes)[3]
    splits = divide("stratified", (8 / 9, 1 / 9, 0), 1000, 0, classes, marked)
    assert ((splits == TEST) == (marked == TEST)).all()
    assert np.bincount(splits).tolist() == [800, 100, 100]


@pytest.mark.parametrize(("by", "what"), [("ratio", "7 records"), ("group", "3 groups")])
def test_more_folds_than_there_is_to_divide_are_refused(by: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"split into 8 folds: there are only {what} to divide"):
        fold(by, 8, 7, 0, None if by == "ratio" else np.arange(7) % 3)
