"""Texts cut into tokens: words, characters or bytes, many texts at a time.

Characters and bytes are numbers (code points, byte values) and never become Python objects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

TokenKind: TypeAlias = Literal["words", "characters", "bytes"]

# Numbers keep their points and commas, words their apostrophes (don't, o'clock) and digits (mp3);
# every other mark is a token of its own. Remnants of markup stay: they tell sources apart.
_WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’]\w+)*|[^\w\s]")


class Tokens(NamedTuple):
    """The tokens of all texts one after the other, and how many each text has."""

    kind: TokenKind
    flat: list[str] | np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def tokenise(texts: Sequence[str], kind: TokenKind) -> Tokens:
    if kind == "words":
        parts = [words(text) for text in texts]
        lengths = _lengths([len(part) for part in parts])
        return Tokens(kind, list(chain.from_iterable(parts)), lengths)
    if kind == "characters":
        lengths = _lengths([len(text) for text in texts])
        # A lone surrogate has no encoding, but a number like any other character.
        whole = "".join(texts).encode("utf-32-le", "surrogatepass")
        return Tokens(kind, np.frombuffer(whole, np.uint32), lengths)
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = _lengths([len(text) for text in encoded])
    return Tokens(kind, np.frombuffer(b"".join(encoded), np.uint8), lengths)


def words(text: str) -> list[str]:
    """Lower-cased words, numbers and marks of one text."""
    return _WORD.findall(text.lower())


def _lengths(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)
