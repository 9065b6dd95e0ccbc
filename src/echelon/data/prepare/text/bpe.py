"""Byte pair encoding, trained on the texts themselves; it encodes any text without unknown tokens.

Texts are first cut into pieces (a word with the blank before it, a number, marks). Each distinct
piece of a block is encoded once, and its tokens are copied to every place where it occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import MissingExtra
from echelon.data.prepare.steps import entries
from echelon.data.prepare.text.tokenise import (
    MARK,
    REST,
    SPACE,
    Cut,
    Piece,
    Tokens,
    by_bytes,
    lowered,
    plain,
)
from echelon.data.prepare.workdir import Learnt

MODEL = "bpe"
KEPT = 500_000
"""Distinct pieces used for training: the most frequent ones."""
_SHOWN = 4_000_000
"""Pieces shown to the trainer; if there are more, each is shown proportionally less often."""
_BETWEEN = "\x1e"


def cut_pieces(texts: Any, *, lower: bool) -> Tokens:
    """Cut texts into pieces; concatenated, the pieces give the texts again."""
    ready = plain(texts)
    return by_bytes(lowered(ready) if lower else ready, _cut)


def train(counted: Learnt, size: int) -> str:
    """Train on pieces and their counts; return the tokenizer, with about `size` tokens, as JSON."""
    tokenizers = _tokenizers()
    tokeniser = tokenizers.Tokenizer(tokenizers.models.BPE())
    before = [
        tokenizers.pre_tokenizers.Split(_BETWEEN, "removed"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokeniser.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(before)
    tokeniser.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    tokeniser.train_from_iterator(_shown(counted), trainer)
    text: str = tokeniser.to_str()
    return text


def vocabulary(model: str) -> Any:
    """Return the tokens as the model writes them; unprintable bytes have signs of their own."""
    return _loaded(model)[1]


def encode_pieces(pieces: Tokens, model: str) -> Tokens:
    """Encode pieces with a trained model."""
    tokeniser, terms = _loaded(model)
    numbers, counts = _encoded(tokeniser, pieces.terms.to_pylist())
    starts = np.concatenate([[0], np.cumsum(counts)])
    at, offsets = entries(starts, pieces.codes.astype(np.int64))
    return Tokens(numbers[at], offsets[pieces.offsets], terms)


def _cut(piece: Piece) -> Cut:
    """Cut where the kind of character changes; a single blank belongs to the piece after it."""
    kinds = np.where(piece.kinds == REST, MARK, piece.kinds)
    first = np.ones(len(kinds), bool)
    first[1:] = kinds[1:] != kinds[:-1]
    starts = np.flatnonzero(first[1:] & (kinds[1:] != SPACE)) + 1
    starts = starts[piece.text[starts - 1] == ord(" ")]
    first[starts] = False
    first[starts - 1] = True
    ends = piece.offsets[1:] - 1
    # A text may begin with blanks; the line feed before them belongs to the text before.
    first[piece.offsets[:-1]] = True
    first[ends] = False
    inside = np.ones(len(kinds), bool)
    inside[ends] = False
    return Cut(inside, first)


def _shown(counted: Learnt) -> Iterator[str]:
    counts = counted["counts"]
    times = np.ceil(counts * min(1.0, _SHOWN / counts.sum())).astype(np.int64)
    for piece, count in zip(counted["terms"].to_pylist(), times.tolist(), strict=True):
        yield _BETWEEN.join([piece] * count)


def _encoded(tokeniser: Any, pieces: list[str]) -> tuple[Any, Any]:
    """Return the token ids of all pieces, concatenated, and the number of tokens of each.

    All pieces go through one call, which uses one thread: the worker processes use all cores.
    """
    alone = [number for number, piece in enumerate(pieces) if _BETWEEN in piece]
    counts = np.zeros(len(pieces), np.int64)
    rest = np.ones(len(pieces), bool)
    rest[alone] = False
    together = tokeniser.encode(_BETWEEN.join(p for p in pieces if _BETWEEN not in p))
    word_of = np.array(together.word_ids, np.int64)
    counts[rest] = np.bincount(word_of, minlength=int(rest.sum()))
    if not alone:
        return np.array(together.ids, np.int32), counts
    return _with_odd_ones(tokeniser, pieces, alone, together.ids, counts)


def _with_odd_ones(
    tokeniser: Any, pieces: list[str], alone: list[int], ids: list[int], counts: Any
) -> tuple[Any, Any]:
    """Add the tokens of pieces that contain the separator, which were encoded one by one."""
    before = np.cumsum(counts) - counts
    parts, done = [], 0
    for number in alone:
        start = int(before[number])
        parts += [ids[done:start], _odd_one(tokeniser, pieces[number])]
        done, counts[number] = start, len(parts[-1])
    parts.append(ids[done:])
    return np.concatenate([np.array(part, np.int32) for part in parts]), counts


def _odd_one(tokeniser: Any, piece: str) -> list[int]:
    sign = tokeniser.token_to_id(_byte_level(_BETWEEN))
    found: list[int] = []
    for number, part in enumerate(piece.split(_BETWEEN)):
        found += ([sign] if number else []) + (tokeniser.encode(part).ids if part else [])
    return found


def _byte_level(sign: str) -> str:
    """Return how the model writes an unprintable byte."""
    byte_level = _tokenizers().pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text: str = byte_level.pre_tokenize_str(sign)[0][0]
    return text


@lru_cache(maxsize=4)
def _loaded(model: str) -> tuple[Any, Any]:
    tokeniser = _tokenizers().Tokenizer.from_str(model)
    count = tokeniser.get_vocab_size()
    return tokeniser, pa.array([tokeniser.id_to_token(n) for n in range(count)], pa.large_utf8())


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra("tokeniser 'bpe'", "bpe") from error
    return tokenizers
