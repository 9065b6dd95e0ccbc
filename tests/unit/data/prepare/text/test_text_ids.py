"""Token ids, pieces of byte pair encoding, word vectors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.config.loading import checked
from echelon.core.errors import ConfigError, MissingExtra
from echelon.data.prepare.recipe import feature_kind
from echelon.data.prepare.steps import Ragged
from echelon.data.prepare.text import bpe
from echelon.data.text import Vocabulary
from tests.unit.data.prepare.text.conftest import Block, Fit, halves


def test_ids_are_those_of_a_job_without_preparation(fit: Fit, reviews: Block) -> None:
    texts = reviews["text"].to_pylist()
    new = {"text": pa.array([*texts[:3], "never seen, but good"])}
    vocabulary = Vocabulary.fit(texts, "words", 100, 2)
    wanted = {"size": 100, "at_least": 2}
    feature, learnt = fit(halves(reviews, 4), kind="tokens", vocabulary=wanted, length=6)
    assert learnt["terms"].to_pylist() == vocabulary.tokens
    made = feature.encode(new, learnt)["x"]
    np.testing.assert_array_equal(made, vocabulary.encode_padded(new["text"].to_pylist(), 6))
    feature, learnt = fit([reviews], kind="tokens", vocabulary=wanted)
    ragged = feature.encode(new, learnt)["x"]
    expected = vocabulary.encode(new["text"].to_pylist())
    assert isinstance(ragged, Ragged)
    np.testing.assert_array_equal(ragged.values, expected.flat)
    np.testing.assert_array_equal(np.diff(ragged.offsets), expected.lengths)


def test_texts_are_cut_to_a_length_and_padded_only_if_wanted(fit: Fit, reviews: Block) -> None:
    new = {"text": pa.array([*reviews["text"].to_pylist()[:3], "", None, "good " * 9])}
    feature, learnt = fit([reviews], kind="tokens", length=6)
    padded: Any = feature.encode(new, learnt)["x"]
    feature, learnt = fit([reviews], kind="tokens", length=6, pad=False)
    made: Any = feature.encode(new, learnt)["x"]
    assert isinstance(made, Ragged)
    lengths = np.diff(made.offsets)
    assert lengths.tolist() == (padded != 0).sum(1).tolist()
    assert (lengths.min(), lengths.max()) == (0, 6)
    np.testing.assert_array_equal(made.values, padded[padded != 0])


def test_padding_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="pad has no effect without a length"):
        checked(feature_kind("tokens"), {"kind": "tokens", "from": "text", "pad": False})


def decoded(model: str, ids: Any) -> list[str]:
    """Back to texts; numbers begin at 2."""
    tokenizers = pytest.importorskip("tokenizers")
    tokeniser = tokenizers.Tokenizer.from_str(model)
    spans = zip(ids.offsets[:-1], ids.offsets[1:], strict=True)
    return [tokeniser.decode((ids.values[low:high] - 2).tolist()) for low, high in spans]


def test_pieces_keep_every_text_whole(fit: Fit, reviews: Block) -> None:
    pytest.importorskip("tokenizers")
    feature, learnt = fit(halves(reviews, 4), kind="tokens", by="bpe", pieces=300, lower=False)
    assert feature.looks == 1
    strange = ["  two  blanks \t", "", "\n", "line\r\nfeeds\x1e\x1e and \x1e", "中文🙂 ünseen 3.5%"]
    texts = [*reviews["text"].to_pylist(), *strange]
    ids = feature.encode({"text": pa.array(texts)}, learnt)["x"]
    assert decoded(learnt[bpe.MODEL], ids) == texts
    assert isinstance(ids, Ragged)
    assert ids.values.max() < len(learnt["terms"]) + 2 == 302
    lengths = np.diff(ids.offsets)[: len(reviews["text"])]
    assert lengths.sum() < sum(map(len, reviews["text"].to_pylist())) / 2
    again = fit(halves(reviews, 7), kind="tokens", by="bpe", pieces=300, lower=False)[1]
    assert again[bpe.MODEL] == learnt[bpe.MODEL]


def test_pieces_are_encoded_as_the_library_does(fit: Fit, reviews: Block) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    _, learnt = fit([reviews], kind="tokens", by="bpe", pieces=300)
    pieces = bpe.cut_pieces(reviews["text"], lower=True)
    found = bpe.encode_pieces(pieces, learnt[bpe.MODEL])
    tokeniser = tokenizers.Tokenizer.from_str(learnt[bpe.MODEL])
    ids: list[int] = []
    for code in pieces.codes.tolist():
        ids += tokeniser.encode(pieces.terms[code].as_py()).ids
    assert found.codes.tolist() == ids


def test_pieces_as_terms_of_a_bag(fit: Fit, reviews: Block) -> None:
    pytest.importorskip("tokenizers")
    feature, learnt = fit([reviews], kind="tfidf", by="bpe", pieces=280, ngrams=2)
    assert feature.looks == 2
    made: Any = feature.encode(reviews, learnt)["x"]
    assert made.width == len(learnt["terms"]) == len(learnt["idf"])


def test_pieces_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"'bpe' needs an extra: .*echelon\[bpe\]"):
        bpe.train({"terms": pa.array(["a"]), "counts": np.ones(1)}, 300)


def couples() -> Block:
    """Words of two worlds that never meet."""
    chance = np.random.default_rng(1)
    worlds = [["sun", "sky", "bird", "cloud", "wind"], ["fish", "sea", "wave", "boat", "sand"]]
    texts = [" ".join(chance.choice(worlds[n % 2], 12)) for n in range(200)]
    return {"text": pa.array([*texts, "", "unknown"])}


@pytest.mark.parametrize("model", ["skip_gram", "cbow"])
def test_words_that_stand_together_get_like_vectors(fit: Fit, model: str) -> None:
    settings = {"kind": "word2vec", "model": model, "width": 16, "epochs": 4, "subsample": 0.0}
    vocabulary = {"at_least": 2}
    feature, learnt = fit(halves(couples(), 120), **settings, vocabulary=vocabulary)
    assert feature.looks == 2
    vectors = learnt["vectors"]
    assert vectors.shape == (12, 16)
    assert not vectors[:2].any()
    unit = vectors[2:] / np.linalg.norm(vectors[2:], axis=1, keepdims=True)
    words = learnt["terms"].to_pylist()
    world = np.array([word in ["sun", "sky", "bird", "cloud", "wind"] for word in words])
    near = unit @ unit.T
    assert near[world][:, world].mean() > near[world][:, ~world].mean() + 0.3
    new = {"text": pa.array(["sun sea sun", "", "unknown", None])}
    made: Any = feature.encode(new, learnt)["x"]
    sun, sea = vectors[2 + words.index("sun")], vectors[2 + words.index("sea")]
    np.testing.assert_allclose(made[0], (2 * sun + sea) / 3, rtol=1e-5)
    assert not made[1:].any()
    again = fit(halves(couples(), 120), **settings, vocabulary=vocabulary)[1]
    np.testing.assert_array_equal(again["vectors"], vectors)
    few = settings | {"epochs": 1, "seed": 1}
    other = fit(halves(couples(), 120), **few, vocabulary=vocabulary)[1]
    assert not np.array_equal(other["vectors"], vectors)


def test_word_vectors_by_token_ids(fit: Fit) -> None:
    settings = {"kind": "word2vec", "make": "tokens", "epochs": 1, "width": 4}
    feature, learnt = fit([couples()], **settings, length=3)
    made: Any = feature.encode({"text": pa.array(["sea what", "sun sun sun sun"])}, learnt)["x"]
    words = learnt["terms"].to_pylist()
    sea, sun = 2 + words.index("sea"), 2 + words.index("sun")
    assert made.tolist() == [[sea, 1, 0], [sun, sun, sun]]
    assert len(learnt["vectors"]) == len(words) + 2
    assert feature.different(learnt) == len(words) + 2, "what a model of tokens asks"
    assert fit([couples()], kind="word2vec", epochs=1)[0].different(learnt) is None


def test_a_length_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="make = 'mean' does not look at length"):
        checked(feature_kind("word2vec"), {"kind": "word2vec", "from": "text", "length": 3})
