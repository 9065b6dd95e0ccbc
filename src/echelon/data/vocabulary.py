"""Tokens and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Self, cast

import numpy as np

from echelon.core.errors import DataError, unknown
from echelon.data.shards.gather import ranges
from echelon.data.text import TokenKind, Tokens, tokenise

PADDING, UNKNOWN = 0, 1
_RESERVED = ("<padding>", "<unknown>")
_KINDS = ("words", "characters", "bytes")


class Ragged(NamedTuple):
    """Token numbers of all texts one after the other, and how many each text has."""

    flat: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


class Vocabulary:
    """The most frequent tokens of some texts: 0 is padding, 1 any token that is not among them.

    Words are strings, characters strings of one, bytes numbers below 256.
    """

    def __init__(self, kind: TokenKind, tokens: Sequence[str | int]) -> None:
        self.kind = kind
        self.tokens = list(tokens)
        if kind == "words":
            self._numbers = {token: number for number, token in enumerate(tokens, 2)}
            return
        codes = [token if isinstance(token, int) else ord(token) for token in tokens]
        # One entry per character there can be: encoding a text is then a single look-up.
        self._table = np.full(0x110000 if kind == "characters" else 256, UNKNOWN, np.int32)
        self._table[np.array(codes, np.int64)] = np.arange(2, len(codes) + 2)

    @classmethod
    def fit(
        cls, texts: Sequence[str], kind: TokenKind, size: int = 30_000, at_least: int = 1
    ) -> Self:
        """At most `size` tokens that occur `at_least` so often, the most frequent first."""
        return cls.of(tokenise(texts, kind), size, at_least)

    @classmethod
    def of(cls, tokens: Tokens, size: int = 30_000, at_least: int = 1) -> Self:
        """The same for texts that are cut into tokens already."""
        counts = np.bincount(tokens.flat)
        codes = np.flatnonzero(counts >= max(1, at_least)).tolist()
        names: list[str | int] = [_name(tokens, code) for code in codes]
        pairs = sorted(zip((-counts[codes]).tolist(), names, strict=True))
        return cls(tokens.kind, [name for _, name in pairs[:size]])

    def __len__(self) -> int:
        """How many numbers there are, padding and unknown included."""
        return len(self.tokens) + len(_RESERVED)

    def encode(self, texts: Sequence[str]) -> Ragged:
        """The numbers of the texts' tokens (int32)."""
        return self.number(tokenise(texts, self.kind))

    def number(self, tokens: Tokens) -> Ragged:
        """The same for texts that are cut into tokens already."""
        assert tokens.kind == self.kind
        table = self._table_of(tokens.words) if self.kind == "words" else self._table
        return Ragged(table[tokens.flat], tokens.lengths)

    def _table_of(self, words: Sequence[str]) -> np.ndarray[Any, Any]:
        numbers = map(self._numbers.get, words, repeat(UNKNOWN))
        return np.fromiter(numbers, np.int32, len(words))

    def encode_padded(self, texts: Sequence[str], length: int) -> np.ndarray[Any, Any]:
        """The first `length` tokens of each text, int64 [N, length], padded with 0."""
        return padded(self.encode(texts), length)

    def decode(self, numbers: Iterable[int]) -> str:
        """The text these numbers stand for; words are set apart by blanks."""
        known = [self.tokens[number - 2] for number in numbers if number >= len(_RESERVED)]
        if self.kind == "bytes":
            return bytes(cast(list[int], known)).decode("utf-8", "replace")
        return (" " if self.kind == "words" else "").join(cast(list[str], known))

    def to_json(self) -> dict[str, Any]:
        """Plain data; `vocabulary` has one entry per number."""
        return {"tokens": self.kind, "vocabulary": [*_RESERVED, *self.tokens]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The vocabulary again, also from the whole of what a data set has fitted."""
        kind, tokens = plain.get("tokens"), plain.get("vocabulary")
        if kind not in _KINDS:
            raise DataError(unknown("kind of tokens", str(kind), _KINDS))
        if not isinstance(tokens, Sequence) or tuple(tokens[:2]) != _RESERVED:
            raise DataError("a vocabulary must be a list that begins with " + ", ".join(_RESERVED))
        return cls(kind, tokens[2:])


def padded(ragged: Ragged, length: int) -> np.ndarray[Any, Any]:
    """The first `length` numbers of each text, int64 [N, length], padded with 0."""
    kept = np.minimum(ragged.lengths, length)
    starts = np.cumsum(ragged.lengths) - ragged.lengths
    out = np.zeros((len(kept), length), np.int64)
    rows = np.arange(len(kept)) * length
    out.reshape(-1)[ranges(rows, kept)] = ragged.flat[ranges(starts, kept)]
    return out


def _name(tokens: Tokens, code: int) -> str | int:
    if tokens.kind == "words":
        return tokens.words[code]
    return chr(code) if tokens.kind == "characters" else code
