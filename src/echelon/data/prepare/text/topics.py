"""Keywords of topics that are found in a sample of the texts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.factors import Spool, topics_of
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


def keywords(
    partials: Iterable[Learnt], learnt: Learnt, settings: Vocabulary, seed: int, scratch: Path
) -> Learnt:
    """The vocabulary that topics choose, and the topics."""
    width = len(learnt["hashes"])
    batches = _batches(partials, width)
    seed %= 1 << 32  # what numpy takes
    if settings.model == "nmf":
        found = _nmf(batches, width, settings.topics, seed, scratch)
    else:
        found = _lda(batches, settings.topics, seed, min(learnt["texts"], settings.sample))
    if found is None:
        raise DataError("no topics: no text of the train split has a term of the vocabulary")
    weights = _telling(np.asarray(found, np.float64), learnt["counts"])
    best = np.argsort(-weights, axis=1, kind="stable")
    chosen = _in_turn(best, settings.size or width)
    names = learnt["terms"].take(pa.array(best[:, :_SHOWN].reshape(-1))).to_pylist()
    shown = min(_SHOWN, width)
    topics = [names[low : low + shown] for low in range(0, len(names), shown)]
    arrays = {key: learnt[key][chosen] for key in ("hashes", "counts", "in_texts")}
    terms = learnt["terms"].take(pa.array(chosen))
    return {**learnt, **arrays, "terms": terms, "topics": topics}


def _lda(batches: Iterable[Any], topics: int, seed: int, texts: int) -> Any:
    """A batch at a time, each once; None of nothing."""
    from sklearn.decomposition import LatentDirichletAllocation

    model = LatentDirichletAllocation(topics, random_state=seed, total_samples=texts)
    fitted = False
    for batch in batches:
        model.partial_fit(batch)
        fitted = True
    return model.components_ if fitted else None


def _nmf(batches: Iterable[Any], width: int, topics: int, seed: int, scratch: Path) -> Any:
    """As often over the texts as it takes: one pass finds little but the noise it began with."""
    spool = Spool(scratch / "counts", width)
    with closing(spool):
        for batch in batches:
            spool.add(batch)
    return topics_of(spool, width, topics, seed, scratch) if spool.rows else None


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
