"""Bags of terms, tf-idf and hashed terms, beside what scikit-learn makes of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from echelon.core.errors import ConfigError
from echelon.data.prepare.steps import Columns, Sparse
from echelon.data.text import WORD
from tests.unit.data.prepare.text.conftest import Block, Fit, halves


def matrix(values: Any) -> csr_matrix:
    assert isinstance(values, Sparse)
    shape = (len(values.offsets) - 1, values.width)
    made = csr_matrix((values.values, values.indices, values.offsets), shape)
    assert made.has_canonical_format
    return made


def fitted(peer: Any, block: Block, terms: Any) -> Any:
    """What scikit-learn makes of it, with columns in our order; both have the same terms."""
    theirs, names = peer.fit_transform(block["text"].to_pylist()), terms.to_pylist()
    assert sorted(names) == sorted(peer.vocabulary_)
    return theirs[:, [peer.vocabulary_[name] for name in names]].toarray()


@pytest.mark.parametrize("ngrams", [1, 2, 3])
@pytest.mark.parametrize(
    "ours",
    [{}, {"sublinear": True}, {"smooth": False}, {"norm": "l1"}, {"norm": "none"}, {"idf": False}],
)
def test_tfidf_is_scikit_learns(fit: Fit, reviews: Block, ours: Any, ngrams: int) -> None:
    names = {"sublinear": "sublinear_tf", "smooth": "smooth_idf", "norm": "norm", "idf": "use_idf"}
    theirs = {names[k]: None if v == "none" else v for k, v in ours.items()}
    wanted = {"size": None, "min_texts": 2, "max_share": 0.7}
    feature, learnt = fit(
        halves(reviews, 4), kind="tfidf", ngrams=ngrams, vocabulary=wanted, **ours
    )
    made = matrix(feature.encode(reviews, learnt)["x"])
    peer = TfidfVectorizer(
        token_pattern=WORD.pattern, ngram_range=(1, ngrams), min_df=2, max_df=0.7, **theirs
    )
    expected = fitted(peer, reviews, learnt["terms"])
    np.testing.assert_allclose(made.toarray(), expected, atol=1e-6)


def test_bag_counts_and_one_hot_tells(fit: Fit, reviews: Block) -> None:
    pattern = r"(?u)\b\w\w+\b"
    settings = {"by": "regex", "pattern": pattern, "vocabulary": {"size": None}}
    feature, learnt = fit([reviews], kind="bag", **settings)
    made = matrix(feature.encode(reviews, learnt)["x"])
    peer = CountVectorizer()
    expected = fitted(peer, reviews, learnt["terms"])
    np.testing.assert_array_equal(made.toarray(), expected)
    feature, learnt = fit([reviews], kind="one_hot_text", **settings)
    np.testing.assert_array_equal(
        matrix(feature.encode(reviews, learnt)["x"]).toarray(), np.minimum(expected, 1)
    )


def test_characters_are_terms_without_blanks_between(fit: Fit) -> None:
    block = {"text": pa.array(["中文文", "文中"])}
    feature, learnt = fit([block], kind="bag", by="characters", ngrams=2)
    assert learnt["terms"].to_pylist() == ["文", "中", "中文", "文中", "文文"]
    np.testing.assert_array_equal(
        matrix(feature.encode(block, learnt)["x"]).toarray(), [[2, 1, 1, 0, 1], [1, 1, 0, 1, 0]]
    )


@pytest.mark.parametrize("ngrams", [1, 2])
def test_rows_do_not_depend_on_blocks(fit: Fit, reviews: Block, ngrams: int) -> None:
    whole, learnt = fit([reviews], kind="tfidf", ngrams=ngrams)
    _, other = fit(halves(reviews, 3), kind="tfidf", ngrams=ngrams)
    assert learnt.keys() == other.keys()
    assert all(np.array_equal(learnt[key], other[key]) for key in learnt)
    parts = [matrix(whole.encode(half, learnt)["x"]) for half in halves(reviews, 3)]
    together = matrix(whole.encode(reviews, learnt)["x"])
    np.testing.assert_array_equal(
        np.concatenate([part.toarray() for part in parts]), together.toarray()
    )


def test_no_rows_and_rows_without_terms(fit: Fit, reviews: Block) -> None:
    for kind in ("tfidf", "bag", "hashed_text"):
        feature, learnt = fit([reviews, {k: v[:0] for k, v in reviews.items()}], kind=kind)
        assert matrix(feature.encode({"text": pa.array([], pa.utf8())}, learnt)["x"]).shape[0] == 0
        strange: Columns = {"text": pa.array(["", None, " "], pa.utf8())}
        assert matrix(feature.encode(strange, learnt)["x"]).nnz == 0


@pytest.mark.parametrize("signed", [True, False])
def test_hashed_terms(fit: Fit, reviews: Block, signed: bool) -> None:
    settings = {"kind": "hashed_text", "ngrams": 2, "signed": signed, "norm": "none"}
    feature, learnt = fit([], **settings, width=1 << 20)
    assert learnt == {}
    made = matrix(feature.encode(reviews, learnt)["x"])
    peer = CountVectorizer(token_pattern=WORD.pattern, ngram_range=(1, 2))
    counts = peer.fit_transform(reviews["text"].to_pylist())
    # Nothing meets in so many columns: each of ours is one of theirs, up to its sign.
    ours = np.abs(made.toarray()[:, np.unique(made.indices)])
    np.testing.assert_array_equal(sorted(ours.T.tolist()), sorted(counts.toarray().T.tolist()))
    assert (made.data < 0).any() == signed


def test_hashed_terms_that_meet_cancel_or_add(fit: Fit) -> None:
    block = {"text": pa.array(["a b c d e f g h", "a a", ""])}
    signed, _ = fit([], kind="hashed_text", width=1, norm="none")
    plain, _ = fit([], kind="hashed_text", width=1, norm="none", signed=False)
    assert matrix(plain.encode(block, {})["x"]).toarray().tolist() == [[8], [2], [0]]
    found = matrix(signed.encode(block, {})["x"]).toarray()
    assert abs(found[0, 0]) < 8
    assert abs(found[1, 0]) == 2


def test_hashed_terms_of_a_matrix_too_wide(fit: Fit) -> None:
    with pytest.raises(ConfigError, match="less than or equal to 1073741824"):
        fit([], kind="hashed_text", width=1 << 31)
