"""Hashed words are pure functions of their names, and distinct for distinct names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from echelon.core.hashing import key, keys, words


def test_a_key_says_which_names_in_which_order() -> None:
    names = [0, 1, -1, 2**63, 2**64 - 1, 2**64, -(2**64), 2**70]
    tuples = [(), *((a,) for a in names), *itertools.product(names, names)]
    found = {key(*names) for names in tuples}
    assert len(found) == len(tuples)


def test_keys_stay_what_they_were() -> None:
    """Resuming a run relies on these never changing."""
    assert key(1, 2, 3) == 0xE15321FA1B22EF9D
    assert keys(2, 7).tolist() == [0x5FB4960DF23C7288, 0xF19A85168BF68C8E]


def test_words_are_those_of_splitmix64() -> None:
    """The published first outputs of the generator when it is seeded with 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert words(np.arange(1, 4, dtype=np.uint64), 1234567).tolist() == published


def test_words_differ_for_different_numbers() -> None:
    low = np.arange(100_000, dtype=np.uint64)
    drawn = words(np.concatenate([low, low + np.uint64(2**63)]), key(5))
    assert len(np.unique(drawn)) == 200_000


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_of_a_word_is_as_often_set_as_not(bit: int) -> None:
    drawn = words(np.arange(40_000, dtype=np.uint64), key(bit))
    share = ((drawn >> np.uint64(bit)) & np.uint64(1)).mean()
    assert abs(share - 0.5) < 5 * 0.5 / 200
