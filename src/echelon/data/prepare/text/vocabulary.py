"""Choose the terms of a vocabulary: by frequency, chi², information gain, or topics.

block ─ count_block ─▶ partial ─┐
                                ├─ learn_vocabulary ─▶ terms with counts, best first
block ─ count_block ─▶ partial ─┘
topics need a second pass: sample_block ─▶ keywords (LDA or NMF) over the candidates
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from echelon.core.config.sections import Section, SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.steps import Values, one_thread
from echelon.data.prepare.text.counts import (
    Groups,
    Records,
    Spill,
    Words,
    count_known,
    count_terms,
    is_new,
    record_type,
)
from echelon.data.prepare.text.tokenise import Tokens
from echelon.data.prepare.workdir import Learnt

Floats = NDArray[np.float64]


_BY_CLASS = ("information", "chi2")


class Vocabulary(Section):
    """Settings: which terms are kept, and how they are ranked."""

    size: PositiveInt | None = 30_000
    """At most this many; null: all that the other settings leave."""
    at_least: PositiveInt = 1
    """Occurrences that a term must have in all texts together."""
    min_texts: PositiveInt = 1
    """Texts that must have it."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest part of all texts that may have it."""
    choose: Literal["frequency", "information", "chi2", "topics"] = "frequency"
    """The most frequent ones; those that say most of a text's class, by information gain (mutual
    information) or chi²; or the keywords of topics that are found in the texts."""
    label: str = ""
    """The column of classes, for `information` and `chi2`."""
    topics: PositiveInt = 20
    """How many topics."""
    model: Literal["lda", "nmf"] = "lda"
    """How topics are found: latent Dirichlet allocation, or non-negative matrix factorisation."""
    sample: PositiveInt = 100_000
    """Texts in which topics are looked for."""

    @model_validator(mode="after")
    def _label_where_used(self) -> Self:
        if (self.choose in _BY_CLASS) != bool(self.label):
            needs = "needs a column of classes" if not self.label else "looks at no label"
            raise SettingError(f"choose = {self.choose!r} {needs}: label", "label", "choose")
        if self.choose == "topics" and self.size is None:
            raise SettingError("choose = 'topics' needs a size", "size", "choose")
        return self

    def candidates(self) -> Self:
        """Return the settings of the first pass, which keeps more terms if topics choose later."""
        if self.choose != "topics":
            return self
        size = max(_CANDIDATES, 2 * (self.size or 0))
        return self.model_copy(update={"choose": "frequency", "size": size})


def count_block(tokens: Tokens, n: int, labels: Values | None) -> Learnt:
    """Count the terms of one block; return a partial for `learn_vocabulary`."""
    texts = len(tokens.offsets) - 1
    if labels is None:
        names, groups = [], None
        counts = np.empty(0, np.int64)
    else:
        coded = pc.fill_null(pa.array(labels).cast(pa.utf8()), "").dictionary_encode()
        names = coded.dictionary.to_pylist()
        of_text = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        groups, counts = Groups(of_text, max(1, len(names))), np.bincount(of_text)
    records = count_terms(tokens, n, groups)
    raw = records.view(np.uint8).reshape(len(records), records.dtype.itemsize)
    return {"words": tokens.terms, "texts": texts, "names": names, "of": counts, "records": raw}


def learn_vocabulary(
    settings: Vocabulary, n: int, between: str, partials: Iterable[Learnt], scratch: Path
) -> Learnt:
    """Merge the partials of all blocks; return the chosen terms, best first, and their counts."""
    kind = record_type(n, grouped=bool(settings.label))
    scratch.mkdir(parents=True, exist_ok=True)
    spill, words, classes, total = Spill(scratch, kind), Words(scratch), _Classes(), 0
    try:
        for partial in partials:
            records = np.ascontiguousarray(partial["records"]).reshape(-1).view(kind)
            if settings.label:
                records = records.copy()
                records["group"] = classes.numbers(partial)[records["group"]]
            spill.add(records)
            words.add(partial["words"])
            total += partial["texts"]
        chosen = _chosen(settings, spill, classes.counts(), total)
        return _described(chosen, words, n, between, total)
    finally:
        words.close()


class _Classes:
    """Numbers for class names, in order of first appearance, and the texts of each class."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counts: list[int] = []

    def numbers(self, partial: Mapping[str, Any]) -> Any:
        found = []
        for name, count in zip(partial["names"], partial["of"].tolist(), strict=True):
            number = self._numbers.setdefault(name, len(self._numbers))
            if number == len(self._counts):
                self._counts.append(0)
            self._counts[number] += count
            found.append(number)
        return np.array(found or [0], np.uint32)

    def counts(self) -> Any:
        return np.array(self._counts, np.int64)


def _chosen(settings: Vocabulary, spill: Spill, classes: Any, total: int) -> Scored:
    best: Scored | None = None
    for part in spill.parts():
        scored = _scored(settings, part, classes, total)
        if best is not None:
            both = [np.concatenate(pair) for pair in zip(best, scored, strict=True)]
            scored = Scored(both[0], both[1])
        few = settings.size is None or len(scored.scores) <= 2 * settings.size
        best = scored if few else scored.best(settings.size)
    assert best is not None
    return best.best(settings.size)


def _scored(settings: Vocabulary, part: Records, classes: Any, total: int) -> Scored:
    grouped = settings.label and len(classes)
    scored = by_class(part, classes, settings.choose) if grouped else by_frequency(part)
    terms = scored.terms
    kept = (terms["count"] >= settings.at_least) & (terms["texts"] >= settings.min_texts)
    kept &= terms["texts"] <= settings.max_share * total
    return Scored(terms[kept], scored.scores[kept])


def _described(chosen: Scored, words: Words, n: int, between: str, total: int) -> Learnt:
    terms, scores = chosen
    if not len(terms):
        raise DataError(
            f"no term is left for the vocabulary: {total} texts of the train split have none that "
            "its settings (at_least, min_texts, max_share) keep"
        )
    names = _names(terms, words, n, between)
    # Best first, then by name. Arrow sorts strings quickly, numpy does not.
    table = pa.table({"score": -scores, "name": names})
    order = pc.sort_indices(table, [("score", "ascending"), ("name", "ascending")]).to_numpy()
    terms = terms[order]
    return {
        "terms": names.take(pa.array(order)),
        "hashes": np.ascontiguousarray(terms["hash"]),
        "counts": terms["count"].astype(np.int64),
        "in_texts": terms["texts"].astype(np.int64),
        "texts": total,
    }


def _names(terms: Records, words: Words, n: int, between: str) -> Any:
    """Return the terms as strings."""
    if n == 1:
        return words.of(terms["hash"])
    parts = terms["tokens"]
    flat = words.of(parts[parts > 0])
    counts = np.concatenate([[0], np.cumsum((parts > 0).sum(1))])
    lists = pa.ListArray.from_arrays(pa.array(counts, pa.int32()), flat)
    return pc.binary_join(lists, pa.scalar(between, pa.large_utf8()))


# Scores


class Scored(NamedTuple):
    """Terms and their scores; higher is better."""

    terms: Records
    scores: Floats

    def best(self, size: int | None) -> Scored:
        """Return the best `size` terms; ties go to the smallest hashes."""
        order = np.lexsort((self.terms["hash"], -self.scores))[:size]
        return Scored(self.terms[order], self.scores[order])


def by_frequency(records: Records) -> Scored:
    return Scored(records, records["count"].astype(np.float64))


def by_class(records: Records, classes: NDArray[Any], choose: str) -> Scored:
    """Score terms by how well they predict the class; `classes` has the texts of each class."""
    new = is_new(records["hash"])
    firsts, which = np.flatnonzero(new), np.cumsum(new) - 1
    terms = records[firsts]
    for field in ("count", "texts"):
        terms[field] = np.add.reduceat(records[field], firsts) if len(firsts) else 0
    rule = _information if choose == "information" else _chi2
    scores = np.empty(len(terms))
    step = max(1, _CELLS // len(classes))
    for low in range(0, len(terms), step):
        start, stop = np.searchsorted(which, [low, low + step])
        some = records[start:stop]
        present = np.zeros((min(step, len(terms) - low), len(classes)))
        present[which[start:stop] - low, some["group"]] = some["texts"]
        scores[low : low + step] = rule(present, classes.astype(np.float64))
    return Scored(terms, scores)


_CELLS = 1 << 18


def _information(present: Floats, classes: Floats) -> Floats:
    """Return the mutual information of "the text has the term" and the class, in nats."""
    total, having = classes.sum(), present.sum(1, keepdims=True)
    there = _shared(present, having, classes, total)
    absent = _shared(classes - present, total - having, classes, total)
    result: Floats = (there + absent) / total
    return result


def _shared(both: Floats, one: Floats, other: Floats, total: float) -> Floats:
    expected = one * other
    ratio = np.ones_like(both)
    np.divide(both * total, expected, out=ratio, where=(both > 0) & (expected > 0))
    result: Floats = (both * np.log(ratio)).sum(1)
    return result


def _chi2(present: Floats, classes: Floats) -> Floats:
    """Return chi² of the observed and expected texts of each class with the term."""
    expected = present.sum(1, keepdims=True) * classes / classes.sum()
    result: Floats = np.divide(
        (present - expected) ** 2, expected, out=np.zeros_like(present), where=expected > 0
    ).sum(1)
    return result


# Topics, found in a sample of the texts


_CANDIDATES = 20_000
"""Terms that topics choose from."""


_BATCH = 1024


_SHOWN = 10


_TINY = 1e-12


def sample_block(tokens: Tokens, learnt: Learnt, n: int, settings: Vocabulary) -> Learnt:
    """Count the candidate terms in every k-th text of a block."""
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
    """Return the vocabulary that topics choose, and the topics."""
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
    """Fit LDA in one pass; return [topics, terms], or None without texts."""
    from sklearn.decomposition import LatentDirichletAllocation

    model = LatentDirichletAllocation(topics, random_state=seed, total_samples=texts)
    fitted = False
    for batch in batches:
        model.partial_fit(batch)
        fitted = True
    return model.components_ if fitted else None


def _nmf(batches: Iterable[Any], width: int, topics: int, seed: int, scratch: Path) -> Any:
    """Fit NMF in many passes over a copy on disk: one pass barely improves on the random start."""
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
    """Weight each term by its share of the topic times the log of share over overall share."""
    share = weights / np.maximum(weights.sum(1, keepdims=True), _TINY)
    common = counts / counts.sum()
    return share * np.log(np.maximum(share, _TINY) / common)


def _in_turn(best: Any, size: int) -> Any:
    """Take the best term of every topic, then the second best, until `size` terms are chosen."""
    order = best.T.reshape(-1)
    _, firsts = np.unique(order, return_index=True)
    return order[np.sort(firsts)][:size]


# Non-negative matrix factorization of more rows than fit into memory
#
#     counts X on disk, a batch at a time        W: the topics of each text, on disk
#     X ≈ W H                                    H: the terms of each topic, in memory
#
# One pass improves W for the present H, batch by batch, and adds up WᵀX and WᵀW, which is all that
# H needs. So a pass equals one of scikit-learn's coordinate descent on the whole X, whatever the
# batch size.


_FACTORS_BATCH = 4096


_PASSES = range(50, 201)


_TEXTS = 1_000_000
"""Passes × texts aimed for, within _PASSES: with many texts fewer passes converge."""


_ENOUGH = 1e-4
"""Stop when a pass changes less than this share of the first one."""


def topics_of(spool: Spool, width: int, topics: int, seed: int, scratch: Path) -> Floats:
    """Return H [topics, width] for the rows of the spool, from a start drawn by the seed."""
    random = np.random.RandomState(seed)
    scale = np.sqrt(spool.total / (spool.rows * width) / topics)
    h: Floats = np.abs(scale * random.standard_normal((topics, width))).T.copy()
    w = np.memmap(scratch / "texts", np.float64, "w+", shape=(spool.rows, topics))
    for low in range(0, spool.rows, _FACTORS_BATCH):
        part = w[low : low + _FACTORS_BATCH]
        part[:] = np.abs(scale * random.standard_normal(part.shape))
    first = 0.0
    with one_thread():
        for at in range(min(max(_TEXTS // spool.rows, _PASSES[0]), _PASSES[-1])):
            change = _pass(spool, w, h)
            first = first if at else change
            if change <= _ENOUGH * first:
                break
    return h.T


def _pass(spool: Spool, w: Any, h: Floats) -> float:
    """Improve W, then H ([width, topics] here), once; return the size of the change."""
    change = 0.0
    seen, own = np.zeros_like(h), np.zeros((h.shape[1], h.shape[1]))
    terms = h.T @ h
    for rows, counts in spool.batches():
        mine = np.array(w[rows])
        change += _nearer(mine, terms, counts @ h)
        seen += counts.T @ mine
        own += mine.T @ mine
        w[rows] = mine
    return change + _nearer(h, own, seen)


def _nearer(rows: Floats, square: Floats, seen: Floats) -> float:
    """Minimize over one topic's column at a time, at least zero; return the size of the change."""
    change = 0.0
    for topic in range(rows.shape[1]):
        slope = rows @ square[:, topic] - seen[:, topic]
        column = rows[:, topic]
        change += float(np.abs(np.where(column == 0, np.minimum(slope, 0), slope)).sum())
        if square[topic, topic]:
            rows[:, topic] = np.maximum(column - slope / square[topic, topic], 0)
    return change


class Spool:
    """A sparse matrix of counts on disk: `add` rows in order, then read `batches` repeatedly."""

    def __init__(self, folder: Path, width: int) -> None:
        self._width = width
        self._folder = folder
        self._offsets = array("q", [0])
        self.total = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._files = [stack.enter_context(self._path(name).open("wb")) for name in _PARTS]
            self._open = stack.pop_all()

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    def add(self, rows: Any) -> None:
        """Append the rows of a CSR matrix."""
        self._files[0].write(rows.indices.astype(np.int32).tobytes())
        self._files[1].write(rows.data.astype(np.float32).tobytes())
        ends = rows.indptr[1:].astype(np.int64) - rows.indptr[0] + self._offsets[-1]
        self._offsets.frombytes(ends.tobytes())
        self.total += float(rows.data.sum(dtype=np.float64))

    def close(self) -> None:
        self._open.close()

    def batches(self) -> Iterator[tuple[slice, Any]]:
        """Yield ranges of rows, and the rows as CSR matrices."""
        from scipy.sparse import csr_matrix

        for low in range(0, self.rows, _FACTORS_BATCH):
            bounds = np.array(self._offsets[low : low + _FACTORS_BATCH + 1])
            start, count = int(bounds[0]), int(bounds[-1] - bounds[0])
            indices, data = (
                np.fromfile(self._path(name), kind, count, offset=start * kind.itemsize)
                for name, kind in _PARTS.items()
            )
            rows = len(bounds) - 1
            parts = data.astype(np.float64), indices, bounds - start
            yield slice(low, low + rows), csr_matrix(parts, shape=(rows, self._width))

    def _path(self, name: str) -> Path:
        return self._folder / name


_PARTS = {"indices": np.dtype(np.int32), "values": np.dtype(np.float32)}
