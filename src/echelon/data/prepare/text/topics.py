"""Keywords of topics that are found in a sample of the texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.numbers import count_known
from echelon.data.prepare.text.tokens import Tokens
from echelon.data.prepare.text.vocabulary import Vocabulary

_BATCH = 1024
_SHOWN = 10
_TINY = 1e-12


def sample_block(tokens: Tokens, learnt: Learnt, n: int, settings: Vocabulary) -> Learnt:
    """Every k-th text of a block, as counts of the candidates."""
    step = -(-learnt["texts"] // settings.sample)
    counts = count_known(tokens, learnt, n)
    keep = np.zeros(len(counts.offsets) - 1, bool)
    keep[::step] = True
    lengths = np.diff(counts.offsets)
    chosen = np.repeat(keep, lengths)
    return {
        "indices": counts.indices[chosen],
        "values": counts.values[chosen].astype(np.float32),
        "lengths": lengths[keep],
    }


def keywords(partials: Iterable[Learnt], learnt: Learnt, settings: Vocabulary, seed: int) -> Learnt:
    """The vocabulary that topics choose, and the topics."""
    width = len(learnt["hashes"])
    model = _model(settings, seed, min(learnt["texts"], settings.sample))
    fitted = False
    for batch in _batches(partials, width):
        model.partial_fit(batch)
        fitted = True
    if not fitted:
        raise DataError("no topics: no text of the train split has a term of the vocabulary")
    weights = _telling(np.asarray(model.components_, np.float64), learnt["counts"])
    best = np.argsort(-weights, axis=1, kind="stable")
    chosen = _in_turn(best, settings.size or width)
    names = learnt["terms"].take(pa.array(best[:, :_SHOWN].reshape(-1))).to_pylist()
    shown = min(_SHOWN, width)
    topics = [names[low : low + shown] for low in range(0, len(names), shown)]
    arrays = {key: learnt[key][chosen] for key in ("hashes", "counts", "in_texts")}
    terms = learnt["terms"].take(pa.array(chosen))
    return {**learnt, **arrays, "terms": terms, "topics": topics}


def _model(settings: Vocabulary, seed: int, texts: int) -> Any:
    from sklearn.decomposition import LatentDirichletAllocation, MiniBatchNMF

    if settings.model == "nmf":
        return MiniBatchNMF(settings.topics, init="random", batch_size=_BATCH, random_state=seed)
    return LatentDirichletAllocation(settings.topics, random_state=seed, total_samples=texts)


def _batches(partials: Iterable[Learnt], width: int) -> Iterable[Any]:
    from scipy.sparse import csr_matrix

    for partial in partials:
        offsets = np.concatenate([[0], np.cumsum(partial["lengths"])])
        whole = csr_matrix(
            (partial["values"], partial["indices"], offsets), shape=(len(offsets) - 1, width)
        )
        whole = whole[np.diff(whole.indptr) > 0]
        for low in range(0, whole.shape[0], _BATCH):
            yield whole[low : low + _BATCH]


def _telling(weights: Any, counts: Any) -> Any:
    """What a term says of a topic: its share there, by how much more that is than elsewhere."""
    share = weights / np.maximum(weights.sum(1, keepdims=True), _TINY)
    common = counts / counts.sum()
    return share * np.log(np.maximum(share, _TINY) / common)


def _in_turn(best: Any, size: int) -> Any:
    """The first term of every topic, then the second ones, … until there are enough."""
    order = best.T.reshape(-1)
    _, firsts = np.unique(order, return_index=True)
    return order[np.sort(firsts)][:size]
