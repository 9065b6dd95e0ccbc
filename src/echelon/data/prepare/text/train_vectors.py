"""Word2vec: vectors of words that tell which words stand near (Mikolov et al. 2013).

Each batch takes some places of the corpus and the words around them. A word's vector is to agree
with those near it and to disagree with words drawn at random; those are drawn once per batch, so
all of a batch's scores against them are one product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.hashing import key
from echelon.data.prepare.text.corpus import Corpus, Passage
from echelon.data.prepare.text.threads import one_thread

_BATCH, _BATCHES = 2048, 64
"""Places of the corpus that are learnt from at one time; fewer, to have so many steps an epoch."""
_DRAWN = 256
"""Words drawn at random for each batch; together they weigh as `negative` per pair."""
_EPSILON = 1e-6


class Plan(NamedTuple):
    """What a recipe says of the training."""

    width: int
    window: int
    negative: int
    cbow: bool
    epochs: int
    rate: float
    subsample: float
    seed: int


def train_vectors(corpus: Corpus, counts: NDArray[Any], plan: Plan) -> NDArray[np.float32]:
    """A vector for each word, the same for the same corpus, plan and seed."""
    with one_thread():
        tables = _Tables(len(counts), plan)
        draw = _Draw(counts, plan)
        size = min(_BATCH, max(1, corpus.size // _BATCHES))
        for epoch in range(plan.epochs):
            for number in draw.order(len(corpus), epoch):
                done = (epoch + draw.part) / plan.epochs
                for batch in _batches(draw.thinned(corpus[number]), plan.window, size, draw):
                    tables.learn(batch, draw.others(), plan.rate * max(0.05, 1 - done))
        vectors: NDArray[np.float32] = tables.inner.numpy()
        return vectors


class _Batch(NamedTuple):
    words: Tensor
    """[B]"""
    near: Tensor
    """[B, 2 × window]"""
    there: Tensor
    """[B, 2 × window]: 1 where `near` has a word of the same text, within reach."""


class _Draw:
    """Everything that is left to chance."""

    def __init__(self, counts: NDArray[Any], plan: Plan) -> None:
        self._chance = torch.Generator()
        self._plan = plan
        self.part = 0.0
        """How much of the epoch is done."""
        shares = torch.from_numpy(counts / counts.sum())
        self._reach = torch.cumsum(shares**0.75, 0)
        ratio = plan.subsample / shares
        self._keep = (ratio.sqrt() + ratio).clamp(max=1.0) if plan.subsample else None

    def order(self, passages: int, epoch: int) -> Iterator[int]:
        self._chance.manual_seed(key(self._plan.seed, epoch) >> 1)
        for done, number in enumerate(self.shuffled(passages).tolist()):
            self.part = done / passages
            yield number

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._chance)

    def reach(self, count: int, window: int) -> Tensor:
        """How far each place looks: near words count more often than far ones."""
        return torch.randint(1, window + 1, (count, 1), generator=self._chance)

    def others(self) -> Tensor:
        places = torch.rand(_DRAWN, generator=self._chance, dtype=torch.float64)
        return torch.searchsorted(self._reach, places * self._reach[-1])

    def thinned(self, passage: Passage) -> tuple[Tensor, Tensor]:
        """Without some of the very frequent words."""
        tokens = torch.from_numpy(passage.tokens.astype(np.int64))
        texts = torch.from_numpy(passage.texts)
        if self._keep is None:
            return tokens, texts
        luck = torch.rand(len(tokens), generator=self._chance, dtype=torch.float64)
        kept = luck < self._keep[tokens]
        return tokens[kept], texts[kept]


def _batches(texts: tuple[Tensor, Tensor], window: int, size: int, draw: _Draw) -> Iterator[_Batch]:
    tokens, owner = texts
    steps = torch.tensor([d for d in range(-window, window + 1) if d])
    for places in draw.shuffled(len(tokens)).split(size):
        at = places[:, None] + steps
        inside = at.clamp(0, len(tokens) - 1)
        there = (at == inside) & (owner[inside] == owner[places][:, None])
        there &= steps.abs() <= draw.reach(len(places), window)
        yield _Batch(tokens[places], tokens[inside], there.float())


class _Tables:
    """Vectors of words as they are looked up (inner) and as they are predicted (outer)."""

    def __init__(self, words: int, plan: Plan) -> None:
        chance = torch.Generator().manual_seed(key(plan.seed, -1) >> 1)
        self.inner = (torch.rand(words, plan.width, generator=chance) - 0.5) / plan.width
        self._outer = torch.zeros(words, plan.width)
        self._seen_inner = torch.full((words,), _EPSILON)
        self._seen_outer = torch.full((words,), _EPSILON)
        self._plan = plan

    def learn(self, batch: _Batch, others: Tensor, rate: float) -> None:
        if self._plan.cbow:
            self._learn_cbow(batch, others, rate)
        else:
            self._learn_skip_gram(batch, others, rate)

    def _learn_skip_gram(self, batch: _Batch, others: Tensor, rate: float) -> None:
        """Each word predicts every word near it."""
        hidden, targets, drawn = (
            self.inner[batch.words],
            self._outer[batch.near],
            self._outer[others],
        )
        right = _pull(torch.einsum("bd,bnd->bn", hidden, targets), 1.0) * batch.there
        weight = batch.there.sum(1, keepdim=True) * (self._plan.negative / _DRAWN)
        wrong = _pull(hidden @ drawn.T, 0.0) * weight
        toward = torch.einsum("bn,bnd->bd", right, targets) + wrong @ drawn
        outward = (right[:, :, None] * hidden[:, None, :])[batch.there > 0]
        self._move(self.inner, self._seen_inner, batch.words, toward, rate)
        near = batch.near[batch.there > 0]
        rows, pulls = torch.cat([near, others]), torch.cat([outward, wrong.T @ hidden])
        self._move(self._outer, self._seen_outer, rows, pulls, rate)

    def _learn_cbow(self, batch: _Batch, others: Tensor, rate: float) -> None:
        """The mean of the words near it predicts each word."""
        share = batch.there / batch.there.sum(1, keepdim=True).clamp(min=1.0)
        hidden = torch.einsum("bn,bnd->bd", share, self.inner[batch.near])
        targets, drawn = self._outer[batch.words], self._outer[others]
        some = (batch.there.sum(1) > 0).float()
        right = _pull((hidden * targets).sum(1), 1.0) * some
        wrong = _pull(hidden @ drawn.T, 0.0) * (some * self._plan.negative / _DRAWN)[:, None]
        toward = right[:, None] * targets + wrong @ drawn
        inward = (share[:, :, None] * toward[:, None, :])[batch.there > 0]
        near = batch.near[batch.there > 0]
        self._move(self.inner, self._seen_inner, near, inward, rate)
        rows = torch.cat([batch.words, others])
        pulls = torch.cat([right[:, None] * hidden, wrong.T @ hidden])
        self._move(self._outer, self._seen_outer, rows, pulls, rate)

    def _move(self, table: Tensor, seen: Tensor, rows: Tensor, pulls: Tensor, rate: float) -> None:
        """Row-wise Adagrad: words that are often pulled move less each time."""
        touched, which = torch.unique(rows, return_inverse=True)
        total = torch.zeros(len(touched), table.shape[1]).index_add_(0, which, pulls)
        power = seen[touched] + total.square().mean(1)
        seen[touched] = power
        table[touched] += rate * total / power.sqrt()[:, None]


def _pull(scores: Tensor, wanted: float) -> Tensor:
    """How strongly two vectors are drawn together (or apart): what is missing of `wanted`."""
    return wanted - torch.sigmoid(scores)
