"""Which terms get a number: the settings, and how they are chosen out of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, PositiveInt, model_validator

from echelon.core.config.sections import Section, SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.columns import Values
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.count import Groups, count_terms
from echelon.data.prepare.text.records import Records, record_type
from echelon.data.prepare.text.score import Scored, by_class, by_frequency
from echelon.data.prepare.text.spill import Spill, Words
from echelon.data.prepare.text.tokens import Tokens

_BY_CLASS = ("information", "chi2")
_CANDIDATES = 20_000
"""Terms among which topics find theirs."""


class Vocabulary(Section):
    """Which terms are kept."""

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
        """What the first pass has to keep."""
        if self.choose != "topics":
            return self
        size = max(_CANDIDATES, 2 * (self.size or 0))
        return self.model_copy(update={"choose": "frequency", "size": size})


def count_block(tokens: Tokens, n: int, labels: Values | None) -> Learnt:
    """What one block says of its terms."""
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
    """Of all blocks: the chosen `terms`, best first, and what is known of them."""
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
    """Numbers for the names of classes, in the order in which blocks bring them."""

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
    # numpy sorts numbers quickly, Arrow strings: best first, and by name where equal.
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
    """The terms as people read them."""
    if n == 1:
        return words.of(terms["hash"])
    parts = terms["tokens"]
    flat = words.of(parts[parts > 0])
    counts = np.concatenate([[0], np.cumsum((parts > 0).sum(1))])
    lists = pa.ListArray.from_arrays(pa.array(counts, pa.int32()), flat)
    return pc.binary_join(lists, pa.scalar(between, pa.large_utf8()))
