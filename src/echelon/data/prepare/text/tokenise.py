"""How texts are cut into tokens: the settings, and the ways there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import MissingExtra
from echelon.data.prepare.text.flat import SPACE, WORD, Piece, Whole, lowered, plain
from echelon.data.prepare.text.spans import by_bytes
from echelon.data.prepare.text.tokens import Tokens, by_characters, numbered
from echelon.data.prepare.text.words import Cut, Mask, cut_words

By = Literal["words", "whitespace", "characters", "regex", "jieba", "bpe"]
_CHUNK = 1000
"""Texts whose tokens are Python objects at one time."""
_PREFIX = re.compile(r"(\(\?u\))?(\\b)?")


class _Run(NamedTuple):
    """Patterns that are found without an engine for regular expressions."""

    word: bool
    """Of letters and digits; else of anything but blanks."""
    at_least: int


_RUNS = {
    r"\w+": _Run(True, 1),
    r"\w\w+": _Run(True, 2),
    r"\w{2,}": _Run(True, 2),
    r"\S+": _Run(False, 1),
}


def tokenise(texts: Any, by: By, *, pattern: str = "", lower: bool = True) -> Tokens:
    """The tokens of an Arrow array of texts; a missing text has none."""
    ready = lowered(plain(texts)) if lower else plain(texts)
    if by == "words":
        return by_bytes(ready, cut_words)
    if by == "whitespace":
        return by_bytes(ready, _cut_blanks)
    if by == "characters":
        return by_characters(ready)
    if by == "jieba":
        return numbered(_by_jieba(ready))
    assert by == "regex", by
    run = _RUNS.get(_PREFIX.sub("", pattern, count=1).removesuffix(r"\b"))
    if run is None:
        return numbered(_by_pattern(ready, re.compile(pattern)))
    tokens = by_bytes(ready, _cut_runs if run.word else _cut_blanks)
    if run.at_least == 1:
        return tokens
    return tokens.only(pc.utf8_length(tokens.terms).to_numpy() >= run.at_least)


def _cut_runs(piece: Piece) -> Cut:
    run = (piece.kinds & WORD).view(np.bool_)
    return Cut(run, _starts(run))


def _cut_blanks(piece: Piece) -> Cut:
    run = piece.kinds != SPACE
    return Cut(run, _starts(run))


def _starts(run: Mask) -> Mask:
    first = run.copy()
    first[1:] = run[1:] > run[:-1]
    return first


def _chunks(texts: Any) -> Iterator[Any]:
    return (texts.slice(low, _CHUNK) for low in range(0, len(texts), _CHUNK))


def _by_pattern(texts: Any, pattern: re.Pattern[str]) -> Iterator[tuple[Any, Whole]]:
    for chunk in _chunks(texts):
        found = list(map(pattern.findall, chunk.to_pylist()))
        counts = np.fromiter(map(len, found), np.int64, len(found))
        yield pa.array(list(chain.from_iterable(found)), pa.utf8()), counts


def _by_jieba(texts: Any) -> Iterator[tuple[Any, Whole]]:
    """Many texts are cut in one call: a line feed always ends a word. Blanks are no words."""
    try:
        import rjieba
    except ImportError as error:
        raise MissingExtra("tokeniser 'jieba'", "chinese") from error
    for chunk in _chunks(pc.replace_substring_regex(texts, r"[\r\n]", " ")):
        words = pa.array(rjieba.cut("".join(text + "\n" for text in chunk.to_pylist())), pa.utf8())
        ends = np.flatnonzero(pc.equal(words, "\n").to_numpy(zero_copy_only=False))
        kept = pc.invert(pc.utf8_is_space(words))
        before = np.cumsum(kept.to_numpy(zero_copy_only=False))[ends]
        yield words.filter(kept), np.diff(before, prepend=0)
