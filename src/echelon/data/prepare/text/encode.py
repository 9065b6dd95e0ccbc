"""Features that turn texts into token ids or sparse rows.

`Text` cuts one column into tokens; `Chosen` adds a vocabulary. Kinds: `tokens` (ids for textcnn and
gpt), `bag`, `one_hot_text` and `tfidf` (sparse rows by vocabulary), `hashed_text` (by hash).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.hashing import hashes
from echelon.data.prepare.steps import MADE, Array, Columns, Feature, Ragged, Sparse, Values
from echelon.data.prepare.text import bpe
from echelon.data.prepare.text import vocabulary as topics
from echelon.data.prepare.text.counts import (
    Counts,
    count_known,
    gathered,
    hashed,
    numbers_of,
    slices,
)
from echelon.data.prepare.text.tokenise import By, Tokens, tokenise
from echelon.data.prepare.text.vocabulary import Vocabulary, count_block, learn_vocabulary
from echelon.data.prepare.workdir import Learnt

# What all text features share


class Text(Feature):
    """Base of all text features: one column of texts, cut into tokens. Its passes have names."""

    by_length: ClassVar[bool] = True
    by: By = "words"
    """What a text is cut into: words, numbers and marks; what blanks set apart; characters;
    matches of a pattern; Chinese words; or pieces that are learnt (byte pair encoding)."""
    pattern: str = ""
    """The regular expression of tokens, for `regex`."""
    lower: bool = True
    """Whether capitals are made small."""
    pieces: PositiveInt = 8_000
    """How many different tokens `bpe` learns; the 256 bytes are always among them."""

    @model_validator(mode="after")
    def _pattern_where_used(self) -> Self:
        if (self.by == "regex") != bool(self.pattern):
            needs = "needs" if self.by == "regex" else "does not look at"
            raise SettingError(f"by = {self.by!r} {needs} a pattern", "pattern", "by")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise SettingError(f"pattern = {self.pattern!r}: {error}", "pattern") from None
        if groups > 1:
            raise SettingError(
                f"pattern = {self.pattern!r}: a token is one group at most, write (?:…)", "pattern"
            )
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the passes over the train split, in order."""
        return (bpe.MODEL,) if self.by == "bpe" else ()

    @property
    def looks(self) -> int:
        return len(self.stages)

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        check_text(self, names)

    def tokens(self, block: Columns, learnt: Learnt) -> Tokens:
        texts: Any = block[self.sources[0]]
        if self.by == "bpe":
            return bpe.encode_pieces(bpe.cut_pieces(texts, lower=self.lower), learnt[bpe.MODEL])
        return tokenise(texts, self.by, pattern=self.pattern, lower=self.lower)

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        assert self.stages[at] == bpe.MODEL, self.stages
        texts: Any = block[self.sources[0]]
        return count_block(bpe.cut_pieces(texts, lower=self.lower), 1, None)

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        assert self.stages[at] == bpe.MODEL, self.stages
        counted = learn_vocabulary(Vocabulary(size=bpe.KEPT), 1, "", partials, scratch)
        model = bpe.train(counted, self.pieces)
        return {**learnt, bpe.MODEL: model, "terms": bpe.vocabulary(model)}


class Chosen(Text):
    """A text feature with a vocabulary of terms."""

    vocabulary: Vocabulary = Vocabulary()
    seed: int = 0
    """Seed of topics and word vectors; the recipe's if not given."""

    @property
    def longest(self) -> int:
        """Number of tokens in the longest terms."""
        return 1

    @property
    def stages(self) -> tuple[str, ...]:
        more = ("topics",) if self.vocabulary.choose == "topics" else ()
        return (*super().stages, "count", *more)

    def reads(self) -> list[str]:
        label = self.vocabulary.label
        return [*self.sources, *([label] if label else [])]

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        if self.stages[at] == "count":
            labels = block[self.vocabulary.label] if self.vocabulary.label else None
            return count_block(self.tokens(block, learnt), self.longest, labels)
        if self.stages[at] == "topics":
            tokens = self.tokens(block, learnt)
            return topics.sample_block(tokens, learnt, self.longest, self.vocabulary)
        return super().look(at, block, learnt)

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if self.stages[at] == "count":
            wanted, between = self.vocabulary.candidates(), "" if self.by == "characters" else " "
            found = learn_vocabulary(wanted, self.longest, between, partials, scratch)
            return {**learnt, **found}
        if self.stages[at] == "topics":
            return topics.keywords(partials, learnt, self.vocabulary, self.seed, scratch)
        return super().learn(at, partials, learnt, scratch)


def check_text(feature: Feature, names: Mapping[str, pa.DataType]) -> None:
    """Refuse a feature whose source is not one column of texts."""
    if len(feature.sources) != 1:
        count = len(feature.sources)
        raise DataError(f"feature {feature.kind}: it is made of one column, not of {count}")
    source = feature.sources[0]
    kind = names[source]
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        what = "made by another feature" if kind == MADE else f"of type {kind}"
        raise DataError(f"feature {feature.kind}: column {source!r} is {what}, not text")


# Sparse rows: one column per term


Norm = Literal["l1", "l2", "none"]


class _Sparse(Chosen):
    """Base of sparse features with one column per term of the vocabulary."""

    ngrams: PositiveInt = 1
    """Terms are of 1 to this many tokens in a row."""

    @property
    def longest(self) -> int:
        return self.ngrams

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        return counts.values

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        counts = count_known(self.tokens(block, learnt), learnt, self.longest)
        values = self.values(counts, learnt).astype(np.float32)
        return {self.name: Sparse(counts.indices, values, counts.offsets, len(learnt["hashes"]))}


class Bag(_Sparse):
    """Kind `bag`: how often a text has each term."""


class OneHotText(_Sparse):
    """Kind `one_hot_text`: 1 for every term that a text has."""

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        return np.ones(len(counts.values))


class Tfidf(_Sparse):
    """Kind `tfidf`: counts, worth more the fewer texts have the term, as scikit-learn has it."""

    sublinear: bool = False
    """1 + log(count) in place of the count."""
    idf: bool = True
    """Whether rare terms are worth more."""
    smooth: bool = True
    """As if one text more had every term once."""
    norm: Norm = "l2"
    """What is made 1 in every row: the sum of its values, or of their squares."""

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found = super().learn(at, partials, learnt, scratch)
        if at + 1 < self.looks:
            return found
        more = int(self.smooth)
        return {**found, "idf": np.log((found["texts"] + more) / (found["in_texts"] + more)) + 1.0}

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        values = 1.0 + np.log(counts.values) if self.sublinear else counts.values.copy()
        if self.idf:
            values *= learnt["idf"][counts.indices]
        return normed(values, counts, self.norm)


def normed(values: NDArray[np.float64], counts: Counts, norm: Norm) -> NDArray[np.float64]:
    """Divide the values of every row by the row's norm."""
    if norm == "none":
        return values
    rows = counts.rows()
    sums = np.bincount(rows, values * values if norm == "l2" else np.abs(values))
    values /= (np.sqrt(sums) if norm == "l2" else np.where(sums > 0, sums, 1.0))[rows]
    return values


# Token ids


PADDING, UNKNOWN = 0, 1


RESERVED = ("<padding>", "<unknown>")


class TokenIds(Chosen):
    """Kind `tokens`: ids of tokens; 0 is padding, 1 an unknown token, then the vocabulary."""

    length: PositiveInt | None = None
    """Texts are cut to this many tokens, and padded to it; left out: sequences of any length."""
    pad: bool = True
    """Without it, texts are cut alone, and a batch is as long as the longest text in it."""

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Self:
        if self.by == "bpe" and "vocabulary" in self.model_fields_set:
            raise SettingError(
                "by = 'bpe' has its own vocabulary: `pieces` says how large it is",
                "vocabulary",
                "by",
            )
        return self

    @model_validator(mode="after")
    def _length_to_pad_to(self) -> Self:
        if self.length is None and "pad" in self.model_fields_set:
            raise SettingError("pad has no effect without a length", "pad", "length")
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        return ("bpe",) if self.by == "bpe" else super().stages

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        tokens = self.tokens(block, learnt)
        ids = Ragged(numbered(tokens, learnt["terms"]), tokens.offsets)
        return {self.name: self._of_length(ids)}

    def _of_length(self, ids: Ragged) -> Values:
        if self.length is None:
            return ids
        return padded(ids, self.length) if self.pad else cut(ids, self.length)

    def different(self, learnt: Learnt) -> int | None:
        return len(RESERVED) + len(learnt["terms"])


def numbered(tokens: Tokens, vocabulary: Any) -> Array:
    """Return the id of each token: 1, or from 2 on for those in the vocabulary."""
    numbers = numbers_of(tokens.terms, vocabulary) + len(RESERVED)
    numbers[numbers < len(RESERVED)] = UNKNOWN
    return numbers[tokens.codes]


def cut(ragged: Ragged, length: int) -> Ragged:
    """Cut each row to its first `length` values."""
    lengths = np.diff(ragged.offsets)
    inside = np.arange(len(ragged.values)) - np.repeat(ragged.offsets[:-1], lengths)
    ends = np.cumsum(np.minimum(lengths, length))
    return Ragged(ragged.values[inside < length], np.concatenate([[0], ends]))


def padded(ragged: Ragged, length: int) -> Array:
    """Cut each row to its first `length` values and pad it with 0."""
    starts, lengths = ragged.offsets[:-1], np.minimum(np.diff(ragged.offsets), length)
    there = np.arange(length) < lengths[:, None]
    out = np.zeros((len(lengths), length), ragged.values.dtype)
    out[there] = ragged.values[(starts[:, None] + np.arange(length))[there]]
    return out


# Sparse rows by hash


class HashedText(Text):
    """Kind `hashed_text`: counts of terms by hash. Nothing is fitted, and no term is unknown."""

    width: Annotated[int, Field(ge=1, le=1 << 30)] = 1 << 18
    """Columns; terms share one by chance."""
    signed: bool = True
    """Half of the terms count negatively, so that what meets by chance cancels out."""
    ngrams: PositiveInt = 1
    """Terms are of 1 to this many tokens in a row."""
    norm: Norm = "l2"
    """What is made 1 in every row: the sum of its values, or of their squares."""

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        tokens = self.tokens(block, learnt)
        signs = 2 if self.signed else 1
        both = gathered(_places(tokens, self.ngrams, self.width * signs), self.width * signs)
        counts = _added(both, self.width) if self.signed else both
        values = normed(counts.values.copy(), counts, self.norm).astype(np.float32)
        return {self.name: Sparse(counts.indices, values, counts.offsets, self.width)}


_PLACE = key(0x9A5E)


_SLICE = 1 << 17


def _places(tokens: Tokens, n: int, width: int) -> Iterator[tuple[Any, Any, int]]:
    single = hashes(tokens.terms)
    for part in slices(tokens, _SLICE):
        levels = list(hashed(part, single, n))
        numbers = words(np.concatenate([found for found, _ in levels]), _PLACE) % np.uint64(width)
        yield numbers, np.concatenate([rows for _, rows in levels]), len(part.offsets) - 1


def _added(both: Counts, width: int) -> Counts:
    """Merge columns 2i, which count up, and 2i + 1, which count down."""
    rows, columns = both.rows(), both.indices >> 1
    signed = np.where(both.indices & 1, -both.values, both.values)
    if not len(rows):
        return both
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    firsts = np.flatnonzero(new)
    sums = np.add.reduceat(signed, firsts)
    left = firsts[sums != 0]
    lengths = np.bincount(rows[left], minlength=len(both.offsets) - 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert columns.max() < width
    return Counts(columns[left], sums[sums != 0], offsets)
