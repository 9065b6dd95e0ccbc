"""Texts cut into tokens: words, characters or bytes, many texts at a time.

A token is a code: the number of a word in the order of its first appearance, a code point, or a
byte. So tokens take four bytes each, and all that follows is done with whole arrays of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

TokenKind: TypeAlias = Literal["words", "characters", "bytes"]

# Numbers keep their points and commas, words their apostrophes (don't, o'clock) and digits (mp3);
# every other mark is a token of its own. Remnants of markup stay: they tell sources apart.
WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’]\w+)*|[^\w\s]")
_CHUNK = 1000
"""Texts whose words are Python objects at one time."""


class Tokens(NamedTuple):
    """The codes of all texts one after the other, and how many each text has."""

    kind: TokenKind
    flat: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    words: Sequence[str] = ()
    """What the codes of words stand for."""

    def take(self, chosen: np.ndarray[Any, Any]) -> Tokens:
        """Those of some of the texts, by a mask."""
        flat = self.flat[np.repeat(chosen, self.lengths)]
        return self._replace(flat=flat, lengths=self.lengths[chosen])


def tokenise(texts: Sequence[str], kind: TokenKind) -> Tokens:
    if kind == "words":
        return _tokenise_words(texts)
    if kind == "characters":
        # A lone surrogate has no encoding, but a number like any other character.
        whole = "".join(texts).encode("utf-32-le", "surrogatepass")
        return Tokens(kind, np.frombuffer(whole, np.uint32), _lengths(texts))
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return Tokens(kind, np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded))


def words(text: str) -> list[str]:
    """Lower-cased words, numbers and marks of one text."""
    return WORD.findall(text.lower())


def _tokenise_words(texts: Sequence[str]) -> Tokens:
    codes: defaultdict[str, int] = defaultdict()
    codes.default_factory = codes.__len__
    flat, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for start in range(0, len(texts), _CHUNK):
        found = [words(text) for text in texts[start : start + _CHUNK]]
        lengths.append(_lengths(found))
        numbers = map(codes.__getitem__, chain.from_iterable(found))
        flat.append(np.fromiter(numbers, np.int32, int(lengths[-1].sum())))
    return Tokens("words", np.concatenate(flat), np.concatenate(lengths), list(codes))


def _lengths(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(map(len, values), np.int64, len(values))
