"""Texts to be classified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data.opening.frames import Frame
from echelon.data.opening.origin import Origin, check_fitted, open_origin
from echelon.data.opening.splits import Splits, split_rows
from echelon.data.opening.targets import Classes, find_target
from echelon.data.sources import ColumnSource, Subset
from echelon.data.text import Tokens, tokenise
from echelon.data.vocabulary import Vocabulary, padded

MAX_LENGTH = 512
"""Tokens of a text that are kept where the job sets no length."""
_ENOUGH = 1000
"""From so many texts on, a word that occurs once counts as unknown: that trains `unknown`."""


def open_text(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Columns `x` (int64 token numbers [L], padded with 0) and `y` (int64 classes).

    With `fitted` nothing is learnt again, all records are held out, and `y` is absent where the
    target is.
    """
    text = section.text if fitted is None else fitted.get("text", section.text)
    # A text such as "007" is to be read as it stands.
    types = {"types": {text: "string"}}
    origin = open_origin(section, new=fitted is not None, usual={"csv": types, "tsv": types})
    if fitted is None:
        return _open(section, seed, origin)
    check_fitted(fitted, "text")
    source = _new_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    labels, shape = tuple(fitted["labels"]), (fitted["length"],)
    return Splits(source, source, labels, shape, dict(fitted), about)


def _open(section: DataSection, seed: int, origin: Origin) -> Splits:
    frame = origin.train
    target = find_target(frame, section.target)
    classes = Classes.fit(frame, target, origin.class_names)
    y = classes.encode(frame, target)
    tokens = tokenise(_texts(frame, section.text), section.tokens or "words")
    learnt = tokens
    if origin.valid is None:
        kept, held = split_rows(len(frame), section.held_out, seed, y)
        learnt = tokens.take(np.isin(np.arange(len(frame)), kept.numpy()))
    vocabulary = _learn_words(section, learnt)
    length = _length(section, learnt.lengths)
    fitted = {
        **{"kind": "text", "target": target, "text": section.text, "length": length},
        **{"classes": classes.values, "labels": classes.names},
        **vocabulary.to_json(),
    }
    whole = ColumnSource({"x": padded(vocabulary.number(tokens), length), "y": y})
    train: BatchSource = whole
    valid: BatchSource
    if origin.valid is None:
        train, valid = Subset(whole, kept), Subset(whole, held)
    else:
        valid = _new_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= {"vocabulary": len(vocabulary), "length": length}
    about["texts_cut"] = int((tokens.lengths > length).sum())
    return Splits(train, valid, tuple(classes.names), (length,), fitted, about)


def _new_source(frame: Frame, fitted: Mapping[str, Any]) -> ColumnSource:
    texts = _texts(frame, fitted["text"])
    x = Vocabulary.from_json(fitted).encode_padded(texts, fitted["length"])
    if not frame.has(fitted["target"]):
        return ColumnSource({"x": x})
    classes = Classes(fitted["classes"], fitted["labels"])
    return ColumnSource({"x": x, "y": classes.encode(frame, fitted["target"])})


def _texts(frame: Frame, name: str) -> list[str]:
    column = frame.column(name, "text column")
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{frame.where}: column {name!r} is of type {kind}: not text")
        column = column.cast(pa.string())
    texts: list[str] = column.fill_null("").to_pylist()
    return texts


def _learn_words(section: DataSection, tokens: Tokens) -> Vocabulary:
    often = tokens.kind == "words" and len(tokens.lengths) >= _ENOUGH
    return Vocabulary.of(tokens, section.vocabulary, at_least=2 if often else 1)


def _length(section: DataSection, lengths: np.ndarray[Any, Any]) -> int:
    longest = int(lengths.max(initial=1))
    return max(1, min(longest, section.length or MAX_LENGTH))
