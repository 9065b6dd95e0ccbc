"""Which terms are chosen, and that memory does not decide it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.feature_selection import chi2
from sklearn.metrics import mutual_info_score

from echelon.core.config.loading import checked
from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare.recipe import feature_kind
from echelon.data.prepare.text import counts as count
from echelon.data.prepare.text import counts as spill
from echelon.data.prepare.text import vocabulary as factors
from echelon.data.prepare.text.vocabulary import Spool
from echelon.data.text import WORD
from tests.unit.data.prepare.text.conftest import Block, Fit, halves


def test_the_most_frequent_first_and_by_name_where_equal(fit: Fit) -> None:
    block = {"text": pa.array(["b b a c", "a d", "c e"])}
    _, learnt = fit([block], kind="bag", vocabulary={"size": 4})
    assert learnt["terms"].to_pylist()[:3] == ["a", "b", "c"]
    assert learnt["counts"].tolist() == [2, 2, 2, 1]
    assert learnt["in_texts"].tolist() == [2, 1, 2, 1]
    assert learnt["texts"] == 3


def test_limits(fit: Fit) -> None:
    block = {"text": pa.array(["b b a c", "a d", "a c e"])}

    def chosen(**vocabulary: Any) -> list[str]:
        terms: list[str] = fit([block], kind="bag", vocabulary=vocabulary)[1]["terms"].to_pylist()
        return terms

    assert chosen(at_least=2) == ["a", "b", "c"]
    assert chosen(min_texts=2) == ["a", "c"]
    assert chosen(max_share=0.7, at_least=2) == ["b", "c"]
    with pytest.raises(DataError, match=r"no term is left for the vocabulary: 3 texts .*at_least"):
        chosen(at_least=4)


@pytest.mark.parametrize("choose", ["chi2", "information"])
def test_terms_that_tell_classes_apart(fit: Fit, reviews: Block, choose: str) -> None:
    peer = CountVectorizer(token_pattern=WORD.pattern, ngram_range=(1, 2), binary=True)
    texts = peer.fit_transform(reviews["text"].to_pylist())
    labels = reviews["label"].to_pylist()
    if choose == "chi2":
        scores = chi2(texts, labels)[0]
    else:
        scores = [mutual_info_score(labels, column) for column in texts.toarray().T]
    score = dict(zip(peer.get_feature_names_out(), scores, strict=True))
    wanted = {"size": 12, "choose": choose, "label": "label"}
    _, learnt = fit(halves(reviews, 5), kind="bag", ngrams=2, vocabulary=wanted)
    found = [score[term] for term in learnt["terms"].to_pylist()]
    np.testing.assert_allclose(found, sorted(scores, reverse=True)[:12], atol=1e-9)


def test_labels_that_a_feature_made_or_that_are_missing(fit: Fit) -> None:
    texts = pa.array(["a x", "a y", "b x", "b y"])
    wanted = {"size": 2, "choose": "chi2", "label": "y"}
    for labels in (np.array([0, 0, 1, 1]), pa.array([None, None, "b", "b"])):
        _, learnt = fit([{"text": texts, "y": labels}], kind="bag", vocabulary=wanted)
        assert learnt["terms"].to_pylist() == ["a", "b"]


def test_more_terms_than_memory_holds(
    fit: Fit, reviews: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = halves(reviews, 3) * 3
    for choice in ({}, {"choose": "chi2", "label": "label"}):
        wanted = {"size": 20, **choice}
        _, whole = fit(blocks, kind="tfidf", ngrams=3, vocabulary=wanted)
        with monkeypatch.context() as little:
            little.setattr(spill, "_MEMORY", 1000)
            little.setattr(count, "_SLICE", 20)
            little.setattr(count, "_CACHED", 8)
            _, spilt = fit(blocks, kind="tfidf", ngrams=3, vocabulary=wanted)
        assert all(np.array_equal(whole[key], spilt[key]) for key in whole)


def test_spilt_terms_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_MEMORY", 100)
    kind = np.dtype([("hash", "<u8"), ("count", "<u8"), ("texts", "<u8")])
    (tmp_path / "terms-000").write_bytes(b"of a run that was killed")
    store = spill.Spill(tmp_path, kind)
    chance = np.random.default_rng(0)
    every = chance.integers(0, 1 << 63, 400, dtype=np.uint64) << np.uint64(1)
    for part in np.split(every, 8):
        store.add(np.array([(value, 1, 1) for value in part], kind))
    assert any(tmp_path.iterdir())
    found = np.concatenate(list(store.parts()))
    np.testing.assert_array_equal(found["hash"], np.unique(every))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["lda", "nmf"])
def test_keywords_of_topics(fit: Fit, model: str) -> None:
    themes = ["goal match team ball", "bank stock price trade", "star planet orbit moon"]
    chance = np.random.default_rng(0)
    texts = [" ".join(chance.choice(themes[n % 3].split(), 8)) + " the" for n in range(120)]
    block = {"text": pa.array(texts)}
    wanted = {"size": 9, "choose": "topics", "topics": 3, "model": model, "sample": 60}
    feature, learnt = fit(halves(block, 50), kind="bag", vocabulary=wanted)
    assert feature.looks == 2
    words = learnt["terms"].to_pylist()
    assert len(words) == len(set(words)) == len(learnt["hashes"]) == 9
    for theme in themes:
        assert len(set(theme.split()) & set(words)) >= 2, words
    assert [len(topic) for topic in learnt["topics"]] == [10] * 3
    _, again = fit(halves(block, 50), kind="bag", vocabulary=wanted)
    assert again["terms"].to_pylist() == words


def spooled(folder: Path, counts: Any, *cuts: int) -> Spool:
    """All rows, as blocks that end at these would bring them."""
    spool = Spool(folder, counts.shape[1])
    bounds = [0, *cuts, counts.shape[0]]
    for low, high in pairwise(bounds):
        spool.add(counts[low:high])
    spool.close()
    return spool


def test_nmf_is_that_of_scikit_learn_wherever_texts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scipy.sparse import random as scattered
    from sklearn.decomposition import NMF
    from sklearn.exceptions import ConvergenceWarning

    counts = scattered(300, 80, 0.1, "csr", rng=np.random.default_rng(0))
    counts.data = np.ceil(4 * counts.data)
    model = NMF(5, init="random", random_state=3, max_iter=50)
    with pytest.warns(ConvergenceWarning):  # the figures on the way are compared, not the end
        model.fit(counts)
    monkeypatch.setattr(factors, "_PASSES", range(50, 51))
    for batch, cuts in ((4096, ()), (64, (10, 10, 211))):
        monkeypatch.setattr(factors, "_FACTORS_BATCH", batch)
        spool = spooled(tmp_path / f"{batch}", counts, *cuts)
        found = factors.topics_of(spool, 80, 5, 3, tmp_path)
        np.testing.assert_allclose(found, model.components_, rtol=0, atol=1e-8)


def test_keywords_of_few_texts_are_no_noise(fit: Fit) -> None:
    """Among rare words that say nothing, those of four themes are found."""
    chance = np.random.default_rng(1)
    words = [[f"t{theme}w{n}" for n in range(15)] for theme in range(4)]
    texts = []
    for at in range(1500):
        rare = [f"r{n}" for n in chance.integers(0, 6000, 12)]
        texts.append(" ".join([*chance.choice(words[at % 4], 8), *rare]))
    wanted = {"size": 60, "choose": "topics", "topics": 4, "model": "nmf"}
    _, learnt = fit(halves({"text": pa.array(texts)}, 700), kind="bag", vocabulary=wanted)
    found = set(learnt["terms"].to_pylist())
    assert found == {word for theme in words for word in theme}
    for topic in learnt["topics"]:
        assert len({word[:2] for word in topic}) == 1


def test_topics_need_texts(fit: Fit) -> None:
    block = {"text": pa.array(["a b"])}
    empty = {"text": pa.array([""])}
    feature, learnt = fit([block], kind="bag")
    topical = checked(
        feature_kind("bag"),
        {"kind": "bag", "from": "text", "vocabulary": {"choose": "topics"}},
    )
    partial = topical.look(1, empty, learnt)
    with pytest.raises(DataError, match="no topics: no text of the train split has a term"):
        topical.learn(1, iter([partial]), learnt, Path())
    assert feature.looks == 1


BAD = [
    ({"by": "regex"}, "by = 'regex' needs a pattern"),
    ({"by": "words", "pattern": "a"}, "by = 'words' does not look at a pattern"),
    ({"by": "regex", "pattern": "("}, r"pattern = '\(': missing \)"),
    ({"by": "regex", "pattern": "(a)(b)"}, "a token is one group at most"),
    ({"by": "word"}, "did you mean 'words'"),
    ({"vocabulary": {"choose": "chi2"}}, "choose = 'chi2' needs a column of classes: label"),
    ({"vocabulary": {"label": "y"}}, "choose = 'frequency' looks at no label"),
    ({"vocabulary": {"choose": "topics", "size": None}}, "choose = 'topics' needs a size"),
    ({"by": "bpe", "vocabulary": {"size": 9}}, "by = 'bpe' has its own vocabulary: `pieces`"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(feature_kind("tokens"), {"kind": "tokens", "from": "text", **settings})


def test_columns_that_do_not_fit() -> None:
    names = {"text": pa.utf8(), "age": pa.int64(), "label": pa.utf8(), "x": pa.null()}

    def check(**settings: Any) -> None:
        checked(feature_kind("bag"), {"kind": "bag", **settings}).check(names)

    check(**{"from": "text"})
    with pytest.raises(DataError, match="feature bag: column 'txt' is unknown; did you mean"):
        check(**{"from": "txt"})
    with pytest.raises(DataError, match="column 'age' is of type int64, not text"):
        check(**{"from": "age"})
    with pytest.raises(DataError, match="column 'x' is made by another feature, not text"):
        check(**{"from": "x"})
    with pytest.raises(DataError, match="it is made of one column, not of 2"):
        check(**{"from": ["text", "label"]})
    with pytest.raises(DataError, match="column 'lable' is unknown; did you mean 'label'"):
        check(**{"from": "text", "vocabulary": {"choose": "chi2", "label": "lable"}})
