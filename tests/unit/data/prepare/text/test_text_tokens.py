"""Tokens of whole blocks are those that one text after the other would give."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from random import Random

import pyarrow as pa
import pytest

from echelon.core.errors import MissingExtra
from echelon.data.prepare.text import tokenise as flat
from echelon.data.prepare.text.tokenise import By, Tokens, tokenise
from echelon.data.text import WORD, words

SIGNS = "ab1２٣.,''’_ \n-é中ΣİX5。　\t\r…𝒳🙂"
BY: dict[By, Callable[[str], list[str]]] = {
    "words": words,
    "whitespace": lambda text: text.lower().split(),
    "characters": lambda text: list(text.lower()),
}
PATTERNS = (r"\w+", r"(?u)\b\w\w+\b", r"\w{2,}", r"\S+", "[a-z]+", "a(b?)")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Everything that can meet, in every order."""
    chance = Random(0)
    return ["".join(chance.choices(SIGNS, k=chance.randrange(30))) for _ in range(3000)]


def lists(tokens: Tokens) -> list[list[str]]:
    terms = tokens.terms.to_pylist()
    assert len(set(terms)) == len(terms)
    spans = zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
    return [[terms[code] for code in tokens.codes[low:high]] for low, high in spans]


@pytest.mark.parametrize("by", BY)
def test_as_text_by_text(by: By, texts: list[str]) -> None:
    assert lists(tokenise(pa.array(texts), by)) == [BY[by](text) for text in texts]


def test_words_with_their_capitals(texts: list[str]) -> None:
    found = lists(tokenise(pa.array(texts), "words", lower=False))
    assert found == [WORD.findall(text) for text in texts]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_find_what_python_finds(pattern: str, texts: list[str]) -> None:
    found = tokenise(pa.array(texts), "regex", pattern=pattern, lower=False)
    assert lists(found) == [re.findall(pattern, text) for text in texts]


def test_no_texts() -> None:
    for by in BY:
        assert lists(tokenise(pa.array([], pa.utf8()), by)) == []


def test_blocks_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_PIECE", 7)
    texts = ["don't", "", "a text that is longer than a piece: 1,000.5", "’tis", "\n", "x" * 20]
    for by, one in BY.items():
        assert lists(tokenise(pa.array(texts), by)) == [one(text) for text in texts]


def test_missing_texts_and_slices_of_arrays() -> None:
    texts = pa.array(["gone", "a b", None, "b", "gone"])[1:4]
    assert lists(tokenise(texts, "words")) == [["a", "b"], [], ["b"]]
    chunks = pa.chunked_array([["a b"], [None, "b"]])
    assert lists(tokenise(chunks, "words")) == [["a", "b"], [], ["b"]]


def test_chinese_words() -> None:
    rjieba = pytest.importorskip("rjieba")
    texts = [
        "我来到北京清华大学",
        "",
        "他说：“3.5 米”\r\n  hello World",
        "\n",
        "小明硕士毕业于中国科学院",
    ]
    found = lists(tokenise(pa.array(texts), "jieba", lower=False))
    assert found == [[w for w in rjieba.cut(text) if not w.isspace()] for text in texts]
    assert "清华大学" in found[0]


def test_chinese_words_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(
        MissingExtra, match=r"tokeniser 'jieba' needs an extra: .*echelon\[chinese\]"
    ):
        tokenise(pa.array(["我"]), "jieba")
