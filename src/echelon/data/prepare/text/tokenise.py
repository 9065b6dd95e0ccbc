"""Cut texts into tokens, by whole blocks: words, blanks, characters, regular expressions, Chinese.

    Arrow texts ─ plain, lowered ─▶ pieces (bytes + kind of each byte) ─ cut ─▶ spans ─▶ Tokens

The fast ways work on bytes: each byte gets the kind of its character (SPACE, WORD, MARK, …), and a
cut is a comparison of neighbors. Texts are processed in pieces that fit into the processor's cache;
whole blocks would go through main memory again and again. Different tokens are then numbered once
per block (`Tokens`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import MissingExtra
from echelon.data.text import WORD as _RULES

Bytes = NDArray[np.uint8]


Whole = NDArray[np.int64]


Mask = NDArray[np.bool_]


NONE: NDArray[np.int64] = np.zeros(1, np.int64)


_TEXT = pa.large_utf8()


class Tokens(NamedTuple):
    """Text i consists of `codes[offsets[i]:offsets[i + 1]]`, numbers of `terms`."""

    codes: NDArray[np.int32]
    offsets: Whole
    terms: Any
    """The distinct tokens, as Arrow strings."""

    def only(self, wanted: NDArray[np.bool_]) -> Tokens:
        """Return the tokens without the unwanted terms."""
        if wanted.all():
            return self
        numbers = np.cumsum(wanted, dtype=np.int32) - 1
        kept = wanted[self.codes]
        before = np.concatenate([[0], np.cumsum(kept)])
        terms = self.terms.filter(pa.array(wanted))
        return Tokens(numbers[self.codes[kept]], before[self.offsets], terms)

    def rows(self) -> NDArray[np.int32]:
        """Return the text number of each token."""
        count = len(self.offsets) - 1
        return np.repeat(np.arange(count, dtype=np.int32), np.diff(self.offsets))


By = Literal["words", "whitespace", "characters", "regex", "jieba", "bpe"]


def tokenise(texts: Any, by: By, *, pattern: str = "", lower: bool = True) -> Tokens:
    """Return the tokens of an Arrow array of texts; a missing text has none."""
    ready = lowered(plain(texts)) if lower else plain(texts)
    if by == "words":
        return by_bytes(ready, cut_words)
    if by == "whitespace":
        return by_bytes(ready, _cut_blanks)
    if by == "characters":
        return by_characters(ready)
    if by == "jieba":
        return numbered(_by_jieba(ready))
    assert by == "regex", by
    run = _RUNS.get(_PREFIX.sub("", pattern, count=1).removesuffix(r"\b"))
    if run is None:
        return numbered(_by_pattern(ready, re.compile(pattern)))
    tokens = by_bytes(ready, _cut_runs if run.word else _cut_blanks)
    if run.at_least == 1:
        return tokens
    return tokens.only(pc.utf8_length(tokens.terms).to_numpy() >= run.at_least)


_PREFIX = re.compile(r"(\(\?u\))?(\\b)?")


class _Run(NamedTuple):
    """A pattern that is found by kinds of bytes, without a regular expression engine."""

    word: bool
    """Runs of letters and digits; otherwise runs of anything but blanks."""
    at_least: int


_RUNS = {
    r"\w+": _Run(True, 1),
    r"\w\w+": _Run(True, 2),
    r"\w{2,}": _Run(True, 2),
    r"\S+": _Run(False, 1),
}


# By Python: any regular expression, and jieba for Chinese


def _by_pattern(texts: Any, pattern: re.Pattern[str]) -> Iterator[tuple[Any, Whole]]:
    for chunk in _chunks(texts):
        found = list(map(pattern.findall, chunk.to_pylist()))
        counts = np.fromiter(map(len, found), np.int64, len(found))
        yield pa.array(list(chain.from_iterable(found)), pa.utf8()), counts


def _by_jieba(texts: Any) -> Iterator[tuple[Any, Whole]]:
    """Cut many texts in one call: a line feed always ends a word. Blanks are dropped."""
    try:
        import rjieba
    except ImportError as error:
        raise MissingExtra("tokeniser 'jieba'", "chinese") from error
    for chunk in _chunks(pc.replace_substring_regex(texts, r"[\r\n]", " ")):
        words = pa.array(rjieba.cut("".join(text + "\n" for text in chunk.to_pylist())), pa.utf8())
        ends = np.flatnonzero(pc.equal(words, "\n").to_numpy(zero_copy_only=False))
        kept = pc.invert(pc.utf8_is_space(words))
        before = np.cumsum(kept.to_numpy(zero_copy_only=False))[ends]
        yield words.filter(kept), np.diff(before, prepend=0)


def _chunks(texts: Any) -> Iterator[Any]:
    return (texts.slice(low, _CHUNK) for low in range(0, len(texts), _CHUNK))


_CHUNK = 1000
"""Texts whose tokens exist as Python objects at the same time."""


def numbered(parts: Iterable[tuple[Any, Whole]]) -> Tokens:
    """Number tokens given as Arrow strings of consecutive texts, with the count per text."""
    arrays, counts = [], [NONE]
    for strings, lengths in parts:
        arrays.append(strings)
        counts.append(lengths)
    coded = pa.chunked_array(arrays, pa.utf8()).dictionary_encode()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in coded.chunks]
    flat = np.concatenate([np.empty(0, np.int32), *codes])
    terms = coded.chunk(0).dictionary if codes else pa.array([], pa.utf8())
    return Tokens(flat, np.cumsum(np.concatenate(counts)), terms.cast(_TEXT))


# By bytes: pieces of text, and the kind of each byte


def by_characters(texts: Any) -> Tokens:
    """Return one token per character; its code point is its key, so nothing is looked up."""
    found, counts = [np.empty(0, np.uint32)], [NONE]
    for piece in pieces(texts):
        begins = (piece.text & 0xC0) != 0x80
        begins[piece.offsets[1:] - 1] = False
        places = np.flatnonzero(begins)
        counts.append(np.diff(np.searchsorted(places, piece.offsets)))
        found.append(points(piece.text, places))
    flat = np.concatenate(found)
    seen = np.bincount(flat) > 0
    numbers = np.cumsum(seen, dtype=np.int32) - 1
    terms = pa.array(list(map(chr, np.flatnonzero(seen).tolist())), _TEXT)
    return Tokens(numbers[flat], np.cumsum(np.concatenate(counts)), terms)


class Piece(NamedTuple):
    """Some texts, each followed by a line feed: text i is `text[offsets[i]:offsets[i + 1]]`."""

    text: Bytes
    kinds: Bytes
    offsets: Whole


def pieces(texts: Any) -> Iterator[Piece]:
    """Yield the texts of an array from `plain`, some at a time."""
    ended = pc.binary_join_element_wise(texts, _END, _NOTHING)
    _, places, buffer = ended.buffers()
    offsets = np.frombuffer(places, np.int64, len(ended) + 1, ended.offset * 8)
    low = 0
    while low < len(ended):
        high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _PIECE)))
        high = min(high, len(ended))
        start, size = int(offsets[low]), int(offsets[high] - offsets[low])
        text = buffer.slice(start, size).to_pybytes()
        yield Piece(np.frombuffer(text, np.uint8), _kinds(text), offsets[low : high + 1] - start)
        low = high


_PIECE = 1 << 19


_END, _NOTHING = pa.scalar("\n", _TEXT), pa.scalar("", _TEXT)


def plain(texts: Any) -> Any:
    """Return texts of any Arrow type as one array of large strings; missing texts become empty."""
    whole = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    whole = whole.cast(_TEXT)
    return whole.fill_null("") if whole.null_count else whole


def lowered(texts: Any) -> Any:
    """Lower texts as `str.lower` does; Arrow alone is wrong for Σ (depends on its place) and İ."""
    low = pc.utf8_lower(texts)
    foreign = np.flatnonzero(~_mask(pc.string_is_ascii(texts)))
    some = texts.take(pa.array(foreign))
    odd = _mask(pc.match_substring(some, "Σ")) | _mask(pc.match_substring(some, "İ"))
    if not odd.any():
        return low
    mended = [text.lower() for text in some.filter(pa.array(odd)).to_pylist()]
    where = np.zeros(len(texts), bool)
    where[foreign[odd]] = True
    return pc.replace_with_mask(low, pa.array(where), pa.array(mended, _TEXT))


def _mask(flags: Any) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = flags.to_numpy(zero_copy_only=False)
    return mask


SPACE, WORD, MARK, REST, DIGIT = 0, 1, 2, 4, 9
"""Kinds of bytes. Letters and digits are odd; REST is a mark's second and later bytes."""


def _kinds(text: bytes) -> Bytes:
    kinds = np.frombuffer(bytearray(text.translate(_ascii_kinds())), np.uint8)
    if not text.isascii():
        _mend(np.frombuffer(text, np.uint8), kinds)
    return kinds


def _mend(text: Bytes, kinds: Bytes) -> None:
    """Set the kinds of characters that have several bytes."""
    places = np.flatnonzero(text >= 0xC0)
    found, sizes = _kinds_by_point()[points(text, places)], lengths(text[places])
    rest = np.where(found == MARK, REST, found).astype(np.uint8)
    kinds[places] = found
    for further in (1, 2, 3):
        some = sizes > further
        kinds[places[some] + further] = rest[some]


def lengths(first: Bytes) -> Bytes:
    """Return the number of bytes of each character, given its first byte."""
    sizes = (first >= 0xC0).astype(np.uint8) + (first >= 0xE0)
    sizes += first >= 0xF0
    return sizes + 1


def points(text: Bytes, places: Whole) -> NDArray[np.uint32]:
    """Return the code points of the characters that begin at these places."""
    first = text[places].astype(np.uint32)
    size = lengths(text[places])
    # A character of n bytes keeps 8, 5, 4 or 3 bits in the first and six in each of the others.
    found = first & np.array([0, 0x7F, 0x1F, 0x0F, 0x07], np.uint32)[size]
    for further in (1, 2, 3):
        some = size > further
        if some.any():
            found[some] = found[some] << 6 | (text[places[some] + further] & 0x3F)
    return found


@cache
def _kinds_by_point() -> Bytes:
    """Return the kind of every code point, as Python's regular expressions see it."""
    characters = np.arange(_POINTS, dtype=np.uint32).view("U1")
    kinds = np.full(_POINTS, MARK, np.uint8)
    kinds[np.strings.isalnum(characters)] = WORD
    kinds[np.strings.isdecimal(characters)] = DIGIT
    kinds[np.strings.isspace(characters)] = SPACE
    kinds[ord("_")] = WORD
    return kinds


_POINTS = 0x110000


@cache
def _ascii_kinds() -> bytes:
    table = bytearray(256)
    for code in range(_HIGH):
        sign = chr(code)
        word = DIGIT if sign.isdecimal() else WORD if sign.isalnum() or sign == "_" else MARK
        table[code] = SPACE if sign.isspace() else word
    return bytes(table)


_HIGH = 0x80


# From bytes to tokens
#
# A token of up to seven bytes is its own key: its bytes, and its length in the eighth byte. Most
# tokens are that short, and comparing numbers is much faster than comparing strings. Longer tokens
# are looked up as strings.


class Cut(NamedTuple):
    """Which bytes belong to a token, and which begin one."""

    inside: Mask
    first: Mask


def by_bytes(texts: Any, cut: Callable[[Piece], Cut]) -> Tokens:
    """Return the tokens that `cut` finds in texts from `plain`."""
    parts = [_spans(piece, cut(piece)) for piece in pieces(texts)]
    codes, keys = _coded([pa.array(part.keys) for part in parts], pa.uint64())
    long_codes, long = _coded([part.long for part in parts], pa.utf8())
    terms = _terms(keys.to_numpy())
    if len(long):
        # The first long token takes the place of key 0, which stands for all of them.
        stand_in = int(np.flatnonzero(keys.to_numpy() == 0)[0])
        numbers = np.where(long_codes == 0, stand_in, long_codes + len(keys) - 1)
        starts = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        at = [part.places + start for part, start in zip(parts, starts, strict=True)]
        codes[np.concatenate(at)] = numbers
        long = long.cast(pa.large_utf8())
        behind = [long.slice(0, 1), terms.slice(stand_in + 1), long.slice(1)]
        terms = pa.concat_arrays([terms.slice(0, stand_in), *behind])
    offsets = np.cumsum(np.concatenate([NONE, *(part.counts for part in parts)]))
    return Tokens(codes, offsets, terms)


class _Spans(NamedTuple):
    keys: NDArray[np.uint64]
    """The key of each token; 0 for long tokens."""
    places: Whole
    """Indices of the long tokens."""
    long: Any
    """The long tokens as Arrow strings."""
    counts: Whole
    """Tokens of each text."""


def _spans(piece: Piece, cut: Cut) -> _Spans:
    inside, first = cut
    starts = np.flatnonzero(first)
    last = inside.copy()
    last[:-1] &= first[1:] | ~inside[1:]
    sizes = np.flatnonzero(last) - starts + 1
    short = np.where(sizes <= _SHORT, sizes, 0)
    eights = _eights(piece.text)[starts]
    eights &= _MASKS[short]
    eights |= _TOPS[short]
    places = np.flatnonzero(short == 0)
    counts = np.diff(np.searchsorted(starts, piece.offsets))
    return _Spans(eights, places, _long(piece.text, starts[places], sizes[places]), counts)


_SHORT = 7


_SIZES = np.arange(_SHORT + 1, dtype=np.uint64)


_MASKS = (np.uint64(1) << (_SIZES * np.uint64(8))) - np.uint64(1)


_TOPS = _SIZES << np.uint64(56)


def _eights(text: Bytes) -> NDArray[np.uint64]:
    """Return the eight bytes from each place on, as one number."""
    padded = np.concatenate([text, np.zeros(_SHORT, np.uint8)])
    return np.ndarray((len(text),), "<u8", padded.data, strides=(1,))


def _long(text: Bytes, starts: Whole, sizes: Whole) -> Any:
    offsets = np.concatenate([NONE, np.cumsum(sizes)])
    at = np.repeat(starts - offsets[:-1], sizes)
    at += np.arange(offsets[-1])
    buffers = [pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(text[at])]
    return pa.StringArray.from_buffers(len(starts), *buffers)


def _coded(arrays: list[Any], kind: Any) -> tuple[NDArray[np.int32], Any]:
    """Number all values; return the numbers and the distinct values."""
    coded = pa.chunked_array(arrays, kind).dictionary_encode()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in coded.chunks]
    flat = np.concatenate([np.empty(0, np.int32), *codes])
    return flat, coded.chunk(0).dictionary if codes else pa.array([], kind)


def _terms(keys: NDArray[np.uint64]) -> Any:
    """Return the strings that keys encode."""
    sizes = (keys >> np.uint64(56)).astype(np.int64)
    table = keys.astype("<u8").view(np.uint8).reshape(-1, 8)
    text = table[np.arange(8) < sizes[:, None]]
    offsets = np.concatenate([NONE, np.cumsum(sizes)])
    return pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))


def _cut_runs(piece: Piece) -> Cut:
    run = (piece.kinds & WORD).view(np.bool_)
    return Cut(run, _starts(run))


def _cut_blanks(piece: Piece) -> Cut:
    run = piece.kinds != SPACE
    return Cut(run, _starts(run))


def _starts(run: Mask) -> Mask:
    first = run.copy()
    first[1:] = run[1:] > run[:-1]
    return first


# Words by the rules of `data.text`
#
# Runs of letters and digits, and single marks, are found by comparing neighbors. Then some runs are
# joined: words by an apostrophe (don't), numbers by points and commas (1,000.5). Only where both
# kinds of joints meet in one chain (5's.7) do earlier joints matter; there the rules' own regular
# expression decides.


def cut_words(piece: Piece) -> Cut:
    kinds = piece.kinds
    run = (kinds & WORD).view(np.bool_)
    first = kinds == MARK
    first[0] |= run[0]
    first[1:] |= run[1:] > run[:-1]
    links = _links(piece, run)
    if len(links.places):
        _join(piece, first, links)
    return Cut(kinds != SPACE, first)


_APOSTROPHE, _QUOTE = ord("'"), np.frombuffer("’".encode(), np.uint8)


_POINT, _COMMA = ord("."), ord(",")


class _Links(NamedTuple):
    """Single marks between two runs of letters or digits that may join the runs."""

    begins: Whole
    """Start of the run before the mark."""
    places: Whole
    ends: Whole
    """Start of the run after the mark."""
    numbers: Mask
    """Whether the mark is a point or comma between digits."""


def _links(piece: Piece, run: Mask) -> _Links:
    text, kinds = piece.text, piece.kinds
    plain = np.flatnonzero(text == _APOSTROPHE)
    curly = np.flatnonzero(text == _QUOTE[0])
    curly = curly[(text[curly + 1] == _QUOTE[1]) & (text[curly + 2] == _QUOTE[2])]
    numeric = np.flatnonzero((text == _POINT) | (text == _COMMA))
    numeric = numeric[(kinds[numeric - 1] == DIGIT) & (kinds[numeric + 1] == DIGIT)]
    places = np.concatenate([plain, curly, numeric])
    widths = np.repeat([1, len(_QUOTE), 1], [len(plain), len(curly), len(numeric)])
    numbers = np.repeat([False, False, True], [len(plain), len(curly), len(numeric)])
    # A piece ends with a line feed, so a byte always follows a mark. Index -1, before the first
    # byte, is that line feed as well.
    joined = run[places - 1] & run[places + widths]
    order = np.flatnonzero(joined)[np.argsort(places[joined])]
    places, widths, numbers = places[order], widths[order], numbers[order]
    return _whole_numbers(piece, _Links(_begins(run, places), places, places + widths, numbers))


def _begins(run: Mask, places: Whole) -> Whole:
    if not len(places):
        return places
    starts = np.flatnonzero(run[1:] > run[:-1]) + 1
    starts = np.concatenate([[0], starts]) if run[0] else starts
    return starts[np.searchsorted(starts, places) - 1]


def _whole_numbers(piece: Piece, links: _Links) -> _Links:
    """Drop points and commas after runs that are not all digits: `mp3.5` is not a number."""
    some = np.flatnonzero(links.numbers)
    if not len(some):
        return links
    begins, places = links.begins[some], links.places[some]
    at = np.minimum(_first_other(piece.kinds, begins), places)
    keep = np.ones(len(links.places), bool)
    keep[some] = at == places
    begins, places, ends, numbers = links
    return _Links(begins[keep], places[keep], ends[keep], numbers[keep])


def _first_other(kinds: Bytes, places: Whole) -> Whole:
    """Return the first byte at or after each place that is not a digit."""
    places = places.copy()
    going = np.flatnonzero(kinds[places] == DIGIT)
    while len(going):
        places[going] += 1
        going = going[kinds[places[going]] == DIGIT]
    return places


def _join(piece: Piece, first: Mask, links: _Links) -> None:
    chained = links.begins[1:] == links.ends[:-1]
    chain = np.concatenate([[0], np.cumsum(~chained)])
    count = np.bincount(chain)
    numeric = np.bincount(chain, links.numbers)
    mixed = ((numeric > 0) & (numeric < count))[chain]
    simple = ~mixed
    first[links.places[simple]] = False
    first[links.ends[simple]] = False
    last = simple & links.numbers & np.append(~chained, True)
    behind = _first_other(piece.kinds, links.ends[last])
    first[behind[piece.kinds[behind] == WORD]] = True  # 3.5mm is a number followed by a word
    odd = np.unique(chain[mixed])
    for low, high in zip(*np.searchsorted(chain, [odd, odd + 1]).tolist(), strict=True):
        _by_rule(piece, first, int(links.begins[low]), int(links.ends[high - 1]))


def _by_rule(piece: Piece, first: Mask, start: int, end: int) -> None:
    """Cut a chain of runs by the rules' expression, up to the end of the run starting at `end`."""
    end += int(np.argmin(piece.kinds[end:] & WORD))
    first[start:end] = False
    for word in _RULES.findall(piece.text[start:end].tobytes().decode()):
        first[start] = True
        start += len(word.encode())
