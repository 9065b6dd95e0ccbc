"""Texts as numbers of tokens: what textcnn and gpt read."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from pydantic import PositiveInt, model_validator

from echelon.core.config.sections import SettingError
from echelon.data.prepare.columns import Array, Columns, Ragged, Values
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.base import Chosen
from echelon.data.prepare.text.numbers import numbers_of
from echelon.data.prepare.text.tokens import Tokens

PADDING, UNKNOWN = 0, 1
RESERVED = ("<padding>", "<unknown>")


class TokenIds(Chosen):
    """Kind `tokens`: 0 is padding, 1 any token without a number, then the vocabulary's terms."""

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
    """The number of each token, from 2 on for those in the vocabulary."""
    numbers = numbers_of(tokens.terms, vocabulary) + len(RESERVED)
    numbers[numbers < len(RESERVED)] = UNKNOWN
    return numbers[tokens.codes]


def cut(ragged: Ragged, length: int) -> Ragged:
    """The first `length` numbers of each row."""
    lengths = np.diff(ragged.offsets)
    inside = np.arange(len(ragged.values)) - np.repeat(ragged.offsets[:-1], lengths)
    ends = np.cumsum(np.minimum(lengths, length))
    return Ragged(ragged.values[inside < length], np.concatenate([[0], ends]))


def padded(ragged: Ragged, length: int) -> Array:
    """The first `length` numbers of each row, with 0 behind the last."""
    starts, lengths = ragged.offsets[:-1], np.minimum(np.diff(ragged.offsets), length)
    there = np.arange(length) < lengths[:, None]
    out = np.zeros((len(lengths), length), ragged.values.dtype)
    out[there] = ragged.values[(starts[:, None] + np.arange(length))[there]]
    return out
