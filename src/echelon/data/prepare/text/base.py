"""What all features made of text have in common: one column of texts, cut into tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import PositiveInt, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns
from echelon.data.prepare.feature import MADE, Feature
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text import bpe, topics
from echelon.data.prepare.text.tokenise import By, tokenise
from echelon.data.prepare.text.tokens import Tokens
from echelon.data.prepare.text.vocabulary import Vocabulary, count_block, learn_vocabulary


class Text(Feature):
    """One column of texts. Passes over the train split are called by what they are for."""

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
        """The passes it needs, in order."""
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
    """Of what is found by chance; the recipe's, if not given."""

    @property
    def longest(self) -> int:
        """Tokens of the longest terms."""
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
    """Refuse whatever is not made of one column of texts."""
    if len(feature.sources) != 1:
        count = len(feature.sources)
        raise DataError(f"feature {feature.kind}: it is made of one column, not of {count}")
    source = feature.sources[0]
    kind = names[source]
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        what = "made by another feature" if kind == MADE else f"of type {kind}"
        raise DataError(f"feature {feature.kind}: column {source!r} is {what}, not text")
