"""Words, numbers and marks, by the rules of `data.text`, over whole pieces of text.

Runs of letters and digits and single marks are found by comparing neighbours. Then some are
joined: words by an apostrophe (don't), numbers by points and commas (1,000.5). What joins what
depends on what is before only where both kinds meet (5's.7): there the rules' own expression
decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.text.flat import DIGIT, MARK, SPACE, WORD, Bytes, Piece, Whole
from echelon.data.text import WORD as _RULES

Mask = NDArray[np.bool_]

_APOSTROPHE, _QUOTE = ord("'"), np.frombuffer("’".encode(), np.uint8)
_POINT, _COMMA = ord("."), ord(",")


class Cut(NamedTuple):
    """Which bytes belong to a token, and which are the first of one."""

    inside: Mask
    first: Mask


class _Links(NamedTuple):
    """Marks that stand alone between two runs and may join them."""

    begins: Whole
    """Where the run before begins."""
    places: Whole
    ends: Whole
    """Where the run behind begins."""
    numbers: Mask
    """Whether it is a point or a comma between digits."""


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
    # A piece ends with a line feed, so there is always something behind a mark; before the
    # very first one stands that line feed too, as numpy counts backwards.
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
    """Without points behind runs that are not digits alone: `mp3.5` is no number."""
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
    """The first byte at or behind each place that is not of a digit."""
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
    first[behind[piece.kinds[behind] == WORD]] = True  # 3.5mm: a number, and a word behind it
    odd = np.unique(chain[mixed])
    for low, high in zip(*np.searchsorted(chain, [odd, odd + 1]).tolist(), strict=True):
        _by_rule(piece, first, int(links.begins[low]), int(links.ends[high - 1]))


def _by_rule(piece: Piece, first: Mask, start: int, end: int) -> None:
    """Cut a chain of runs anew, from its first byte to the end of the run that begins at `end`."""
    end += int(np.argmin(piece.kinds[end:] & WORD))
    first[start:end] = False
    for word in _RULES.findall(piece.text[start:end].tobytes().decode()):
        first[start] = True
        start += len(word.encode())
