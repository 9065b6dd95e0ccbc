"""Texts become tokens, and tokens become numbers."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.data import Vocabulary, tokenise
from echelon.data.text import TokenKind, padded, words

KINDS: tuple[TokenKind, ...] = ("words", "characters", "bytes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's the DOG, don't!", ["it's", "the", "dog", ",", "don't", "!"]),
        ("paid $1,350.75 for 3 mp3s.", ["paid", "$", "1,350.75", "for", "3", "mp3s", "."]),
        ("in the 1990s; 5%", ["in", "the", "1990s", ";", "5", "%"]),
        ("Müller’s café", ["müller’s", "café"]),
        ("  \n\t ", []),
        ("'quoted'", ["'", "quoted", "'"]),
        ("end.Next", ["end", ".", "next"]),
    ],
)
def test_words_keep_numbers_and_apostrophes_together(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_characters_and_bytes_are_numbers() -> None:
    texts = ["é中", "", "a😀"]
    characters = tokenise(texts, "characters")
    assert list(characters.flat) == [ord(c) for c in "é中a😀"]
    assert characters.lengths.tolist() == [2, 0, 2]
    in_bytes = tokenise(texts, "bytes")
    assert bytes(np.asarray(in_bytes.flat)) == "é中a😀".encode()
    assert in_bytes.lengths.tolist() == [5, 0, 5]


def test_the_most_frequent_come_first_and_ties_are_settled_by_name() -> None:
    vocabulary = Vocabulary.fit(["b b a c", "a d c"], "words", size=3)
    assert vocabulary.tokens == ["a", "b", "c"]
    assert len(vocabulary) == 5
    assert vocabulary.encode(["a d b", ""]).flat.tolist() == [2, 1, 3]


def test_rare_tokens_can_be_left_out() -> None:
    assert Vocabulary.fit(["a a b"], "words", at_least=2).tokens == ["a"]


def test_texts_are_cut_and_padded() -> None:
    vocabulary = Vocabulary.fit(["a b c"], "words")
    matrix = vocabulary.encode_padded(["c b a a", "b", ""], 3)
    assert matrix.tolist() == [[4, 3, 2], [3, 0, 0], [0, 0, 0]]
    assert matrix.dtype == np.int64


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_stand_for_the_text_they_came_from(kind: TokenKind) -> None:
    text = "to be or not to be" if kind == "words" else "to be or not\n中😀 To be"
    vocabulary = Vocabulary.fit([text], kind)
    assert vocabulary.decode(vocabulary.encode([text]).flat.tolist()) == text
    assert vocabulary.decode([0, 1]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_json(kind: TokenKind) -> None:
    vocabulary = Vocabulary.fit(["some text 中", "more text"], kind)
    plain = json.loads(json.dumps({"labels": ["a"], **vocabulary.to_json()}))
    again = Vocabulary.from_json(plain)
    assert len(plain["vocabulary"]) == len(vocabulary) == len(again)
    texts = ["text unseen 国"]
    assert again.encode(texts).flat.tolist() == vocabulary.encode(texts).flat.tolist()


@given(st.lists(st.text(max_size=12), max_size=6), st.integers(1, 8), st.sampled_from(KINDS))
def test_the_whole_batch_is_as_one_by_one(texts: list[str], length: int, kind: TokenKind) -> None:
    vocabulary = Vocabulary.fit(texts[:3], kind)
    matrix = padded(vocabulary.encode(texts), length)
    assert matrix.shape == (len(texts), length)
    for text, row in zip(texts, matrix, strict=True):
        numbers = vocabulary.encode([text]).flat[:length].tolist()
        assert row.tolist() == numbers + [0] * (length - len(numbers))


def test_what_is_no_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="kind of tokens 'syllables' is unknown"):
        Vocabulary.from_json({"tokens": "syllables", "vocabulary": []})
    with pytest.raises(DataError, match="must be a list that begins with <padding>, <unknown>"):
        Vocabulary.from_json({"tokens": "words", "vocabulary": ["the"]})


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_texts_are_encoded_at_once(kind: TokenKind) -> None:
    text = "The quick brown fox jumps over the lazy dog, and it isn't paid $1.50 for that. " * 3
    texts = [f"{text} {number}" for number in range(10_000)]
    vocabulary = Vocabulary.fit(texts[:1000], kind)
    start = time.process_time()
    vocabulary.encode_padded(texts, 64)
    assert time.process_time() - start < 6.0  # 0.3 s on an idle core
