"""Words as vectors that are trained here, and texts as means of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from echelon.core.config.sections import SettingError
from echelon.data.prepare.columns import Array, Columns, Ragged, Values
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.base import Chosen
from echelon.data.prepare.text.corpus import Corpus
from echelon.data.prepare.text.ids import RESERVED, numbered, padded
from echelon.data.prepare.text.numbers import count_known, numbers_of


class Word2Vec(Chosen):
    """Kind `word2vec`: a mean vector per text, or token ids and the matrix they look up."""

    width: PositiveInt = 100
    """Numbers in a vector."""
    window: PositiveInt = 5
    """How many words to either side are near."""
    model: Literal["skip_gram", "cbow"] = "skip_gram"
    """Whether words predict those near them, or the other way round."""
    negative: PositiveInt = 5
    """Words drawn at random for each that is near."""
    epochs: PositiveInt = 5
    rate: PositiveFloat = 0.05
    subsample: Annotated[float, NonNegativeFloat, Field(lt=1)] = 1e-3
    """Words more frequent than this are left out now and then; 0: never."""
    make: Literal["mean", "tokens"] = "mean"
    """One vector per text; or token ids as `tokens` makes them, and `vectors` with a row for each
    id among what is learnt."""
    length: PositiveInt | None = None
    """Of token ids: texts are cut or padded to this many."""

    @model_validator(mode="after")
    def _length_where_used(self) -> Self:
        if self.length is not None and self.make == "mean":
            raise SettingError("make = 'mean' does not look at length", "length", "make")
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        return (*super().stages, "corpus")

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        if self.stages[at] != "corpus":
            return super().look(at, block, learnt)
        tokens = self.tokens(block, learnt)
        numbers = numbers_of(tokens.terms, learnt["terms"])[tokens.codes]
        before = np.concatenate([[0], np.cumsum(numbers >= 0)])
        return {"tokens": numbers[numbers >= 0], "lengths": np.diff(before[tokens.offsets])}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if self.stages[at] != "corpus":
            return super().learn(at, partials, learnt, scratch)
        from echelon.data.prepare.text.train_vectors import Plan, train_vectors

        corpus = Corpus(partials, scratch / "corpus")
        cbow = self.model == "cbow"
        plan = Plan(
            self.width,
            self.window,
            self.negative,
            cbow,
            self.epochs,
            self.rate,
            self.subsample,
            self.seed,
        )
        vectors = train_vectors(corpus, learnt["counts"], plan)
        none = np.zeros((len(RESERVED), self.width), np.float32)
        return {**learnt, "vectors": np.concatenate([none, vectors])}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        if self.make == "mean":
            return {self.name: self._means(block, learnt)}
        tokens = self.tokens(block, learnt)
        ids = Ragged(numbered(tokens, learnt["terms"]), tokens.offsets)
        return {self.name: ids if self.length is None else padded(ids, self.length)}

    def different(self, learnt: Learnt) -> int | None:
        return len(learnt["vectors"]) if self.make == "tokens" else None

    def _means(self, block: Columns, learnt: Learnt) -> Array:
        from scipy.sparse import csr_matrix

        counts = count_known(self.tokens(block, learnt), learnt, 1)
        vectors = learnt["vectors"][len(RESERVED) :]
        rows = len(counts.offsets) - 1
        values = counts.values.astype(np.float32)
        matrix = csr_matrix((values, counts.indices, counts.offsets), (rows, len(vectors)))
        words = np.bincount(counts.rows(), counts.values, minlength=rows).astype(np.float32)
        means: Array = (matrix @ vectors) / np.maximum(words, 1)[:, None]
        return means
