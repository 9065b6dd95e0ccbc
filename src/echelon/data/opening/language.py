"""One long text for a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError, unknown
from echelon.data.opening.origin import about_parts, check_fitted, locate
from echelon.data.opening.parts import Part
from echelon.data.opening.splits import Splits
from echelon.data.readers.stream import decode, read_bytes
from echelon.data.text import TokenKind, Tokens, tokenise
from echelon.data.vocabulary import Vocabulary
from echelon.data.windows import WindowSource

LENGTH = 128
"""The context where the job sets no length."""
HELD_OUT = 0.1
"""The last part of the text that is kept for validation where the job does not say."""


def open_language(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Windows `x` and `y` (int64 [T]) over a text of characters or bytes.

    A window begins where the one before ends, or every `stride` tokens (an option). The last
    part of the text is held out; with `fitted`, all of it is, and nothing is learnt again.
    """
    del seed  # a text is not shuffled before it is cut
    parts = locate(section, new=fitted is not None, recognise=lambda _: "text", one_text=True)
    if fitted is not None:
        check_fitted(fitted, "language")
        vocabulary = Vocabulary.from_json(fitted)
        tokens = _number(vocabulary, _read(parts.train, vocabulary.kind))
        source = WindowSource(tokens, fitted["length"], fitted["length"])
        about = {**about_parts(parts), "held_out_tokens": len(tokens)}
        return Splits(source, source, (), (fitted["length"],), dict(fitted), about)
    kind = _kind(section)
    train = _read(parts.train, kind)
    if parts.valid is not None:
        valid = _read(parts.valid, kind)
    else:
        train, valid = _cut(section, train)
    vocabulary = Vocabulary.of(train, section.vocabulary)
    length, stride = section.length or LENGTH, _stride(section)
    train_tokens, valid_tokens = _number(vocabulary, train), _number(vocabulary, valid)
    about = {**about_parts(parts), "vocabulary": len(vocabulary), "length": length}
    about |= {"tokens": len(train_tokens), "held_out_tokens": len(valid_tokens)}
    return Splits(
        WindowSource(train_tokens, length, stride or length),
        WindowSource(valid_tokens, length, length),
        (),
        (length,),
        {"kind": "language", "length": length, **vocabulary.to_json()},
        about,
    )


def _kind(section: DataSection) -> TokenKind:
    if section.tokens == "words":
        raise DataError("data.tokens: a language model reads characters or bytes, not words")
    return section.tokens or "characters"


def _stride(section: DataSection) -> int | None:
    for name in section.options:
        if name != "stride":
            raise DataError(unknown("option of a language model's data", name, ["stride"]))
    stride = section.options.get("stride")
    if stride is not None and (not isinstance(stride, int) or stride < 1):
        raise DataError(f"data.options.stride is {stride!r}: it must be a whole number above 0")
    return stride


def _read(part: Part, kind: TokenKind) -> Tokens:
    """All files of a part as one text."""
    content = b"".join(read_bytes(path) for path in part.paths)
    if not content:
        raise DataError(f"{part.where}: empty")
    if kind == "bytes":
        # What is read as bytes need not be UTF-8.
        return Tokens(kind, np.frombuffer(content, np.uint8), np.array([len(content)]))
    return tokenise([decode(content, part.paths[0])], kind)


def _cut(section: DataSection, tokens: Tokens) -> tuple[Tokens, Tokens]:
    kept = int(len(tokens.flat) * (1 - (section.held_out or HELD_OUT)))
    halves = tokens.flat[:kept], tokens.flat[kept:]
    first, second = (Tokens(tokens.kind, half, np.array([len(half)])) for half in halves)
    return first, second


def _number(vocabulary: Vocabulary, tokens: Tokens) -> Tensor:
    return torch.from_numpy(vocabulary.number(tokens).flat)
