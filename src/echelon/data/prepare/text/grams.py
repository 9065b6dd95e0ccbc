"""Terms of several tokens in a row: where they are in a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.text.flat import Whole
from echelon.data.prepare.text.hashes import Hashes, joined
from echelon.data.prepare.text.tokens import Tokens


class Places(NamedTuple):
    """Where terms of some length are: which text, and which token is their last one."""

    rows: NDArray[np.int32]
    last: Whole

    def longer(self) -> tuple[Whole, Places]:
        """Which of these go on for one more token of the same text, and where those are."""
        on = np.flatnonzero(self.rows[1:] == self.rows[:-1])
        return on, Places(self.rows[on], self.last[on] + 1)


def places(tokens: Tokens) -> Places:
    """Of the tokens themselves."""
    return Places(tokens.rows(), np.arange(len(tokens.codes)))


def slices(tokens: Tokens, most: int) -> Iterator[Tokens]:
    """Whole texts of about `most` tokens at a time, with the numbers of the block's terms."""
    offsets, count = tokens.offsets, len(tokens.offsets) - 1
    low = 0
    while low < count:
        high = int(np.searchsorted(offsets, offsets[low] + most, "right")) - 1
        high = max(low + 1, min(high, count))
        start, stop = int(offsets[low]), int(offsets[high])
        yield Tokens(tokens.codes[start:stop], offsets[low : high + 1] - start, tokens.terms)
        low = high


def hashed(tokens: Tokens, terms: Hashes, n: int) -> Iterator[tuple[Hashes, NDArray[np.int32]]]:
    """Per number of tokens 1 … n: the hash of every term in its place, and the places' texts."""
    at, single = places(tokens), terms[tokens.codes]
    here = single
    for order in range(1, n + 1):
        if order > 1:
            on, at = at.longer()
            here = joined(here[on], single[at.last])
        yield here, at.rows
