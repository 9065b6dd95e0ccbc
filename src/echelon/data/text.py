"""Tokens of texts in memory, and the vocabulary that numbers them.

    texts ── tokenise ──▶ Tokens (codes) ── Vocabulary.number ──▶ Ragged ── padded ──▶ [N, length]

Many texts are tokenized at a time, into words, characters or bytes. A token is a code: the number
of a word in the order of its first appearance, a code point, or a byte. So a token takes at most
four bytes, and all further work is done on whole arrays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import numpy as np

from echelon.core.errors import DataError, unknown
from echelon.data.shards.read import ranges

TokenKind: TypeAlias = Literal["words", "characters", "bytes"]


# Numbers keep their points and commas, words their apostrophes (don't, o'clock) and digits (mp3);
# every other mark is a token of its own. Remnants of markup stay, because they help to distinguish
# sources.
WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’]\w+)*|[^\w\s]")
_CHUNK = 1000
"""Texts whose words are Python strings at the same time."""


class Tokens(NamedTuple):
    """The codes of all texts one after the other, and how many each text has."""

    kind: TokenKind
    flat: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    words: Sequence[str] = ()
    """The word of each code; empty for characters and bytes."""

    def take(self, chosen: np.ndarray[Any, Any]) -> Tokens:
        """Return the tokens of the texts chosen by a boolean mask."""
        flat = self.flat[np.repeat(chosen, self.lengths)]
        return self._replace(flat=flat, lengths=self.lengths[chosen])


def tokenise(texts: Sequence[str], kind: TokenKind) -> Tokens:
    if kind == "words":
        return _tokenise_words(texts)
    if kind == "characters":
        # A lone surrogate has no encoding, but it has a code point like any other character.
        whole = "".join(texts).encode("utf-32-le", "surrogatepass")
        return Tokens(kind, np.frombuffer(whole, np.uint32), _lengths(texts))
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return Tokens(kind, np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded))


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


def words(text: str) -> list[str]:
    """Return the words, numbers and marks of one text in lower case."""
    return WORD.findall(text.lower())


def _lengths(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(map(len, values), np.int64, len(values))


# Tokens as numbers

PADDING, UNKNOWN = 0, 1
_RESERVED = ("<padding>", "<unknown>")
_KINDS = ("words", "characters", "bytes")


class Vocabulary:
    """A number for each of the most frequent tokens; 0 is padding, 1 is any other token.

    Tokens are strings for words, strings of length one for characters, integers for bytes.
    """

    def __init__(self, kind: TokenKind, tokens: Sequence[str | int]) -> None:
        self.kind = kind
        self.tokens = list(tokens)
        if kind == "words":
            self._numbers = {token: number for number, token in enumerate(tokens, 2)}
            return
        codes = [token if isinstance(token, int) else ord(token) for token in tokens]
        # One entry per possible character, so that encoding texts is a single lookup.
        self._table = np.full(0x110000 if kind == "characters" else 256, UNKNOWN, np.int32)
        self._table[np.array(codes, np.int64)] = np.arange(2, len(codes) + 2)

    @classmethod
    def fit(
        cls, texts: Sequence[str], kind: TokenKind, size: int = 30_000, at_least: int = 1
    ) -> Self:
        """Learn the `size` most frequent tokens that occur at least `at_least` times."""
        return cls.of(tokenise(texts, kind), size, at_least)

    @classmethod
    def of(cls, tokens: Tokens, size: int = 30_000, at_least: int = 1) -> Self:
        """Do what `fit` does, for texts that are tokens already."""
        counts = np.bincount(tokens.flat)
        codes = np.flatnonzero(counts >= max(1, at_least)).tolist()
        names: list[str | int] = [_name(tokens, code) for code in codes]
        pairs = sorted(zip((-counts[codes]).tolist(), names, strict=True))
        return cls(tokens.kind, [name for _, name in pairs[:size]])

    def __len__(self) -> int:
        """Return how many numbers there are, including padding and unknown."""
        return len(self.tokens) + len(_RESERVED)

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Return the numbers of the texts' tokens (int32)."""
        return self.number(tokenise(texts, self.kind))

    def number(self, tokens: Tokens) -> Ragged:
        """Do what `encode` does, for texts that are tokens already."""
        assert tokens.kind == self.kind
        table = self._table_of(tokens.words) if self.kind == "words" else self._table
        return Ragged(table[tokens.flat], tokens.lengths)

    def _table_of(self, words: Sequence[str]) -> np.ndarray[Any, Any]:
        numbers = map(self._numbers.get, words, repeat(UNKNOWN))
        return np.fromiter(numbers, np.int32, len(words))

    def encode_padded(self, texts: Sequence[str], length: int) -> np.ndarray[Any, Any]:
        """Return the first `length` tokens of each text, int64 [N, length], padded with 0."""
        return padded(self.encode(texts), length)

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text of these numbers, with spaces between words; 0 and 1 are skipped."""
        known = [self.tokens[number - 2] for number in numbers if number >= len(_RESERVED)]
        if self.kind == "bytes":
            return bytes(cast(list[int], known)).decode("utf-8", "replace")
        return (" " if self.kind == "words" else "").join(cast(list[str], known))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; its `vocabulary` has one entry per number."""
        return {"tokens": self.kind, "vocabulary": [*_RESERVED, *self.tokens]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Return the vocabulary that `to_json` wrote; other keys are ignored."""
        kind, tokens = plain.get("tokens"), plain.get("vocabulary")
        if kind not in _KINDS:
            raise DataError(unknown("kind of tokens", str(kind), _KINDS))
        if not isinstance(tokens, Sequence) or tuple(tokens[:2]) != _RESERVED:
            raise DataError("a vocabulary must be a list that begins with " + ", ".join(_RESERVED))
        return cls(kind, tokens[2:])


def _name(tokens: Tokens, code: int) -> str | int:
    if tokens.kind == "words":
        return tokens.words[code]
    return chr(code) if tokens.kind == "characters" else code


class Ragged(NamedTuple):
    """Token numbers of all texts one after the other, and how many each text has."""

    flat: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def padded(ragged: Ragged, length: int) -> np.ndarray[Any, Any]:
    """Return the first `length` numbers of each text, int64 [N, length], padded with 0."""
    kept = np.minimum(ragged.lengths, length)
    starts = np.cumsum(ragged.lengths) - ragged.lengths
    out = np.zeros((len(kept), length), np.int64)
    rows = np.arange(len(kept)) * length
    out.reshape(-1)[ranges(rows, kept)] = ragged.flat[ranges(starts, kept)]
    return out
