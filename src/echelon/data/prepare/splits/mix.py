"""All records of a shard are mixed in the end: whoever writes them can find out where each goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.core.hashing import key
from echelon.data.order import Order
from echelon.data.prepare.splits.part import Codes, Numbers
from echelon.data.prepare.splits.ranks import alike, chunks

_TAG = 0xDEA1


class Mixing:
    """Cards lie in their hand as they were dealt, sorted by class: here every hand is mixed.

    `sizes` are the records of each split, `shards` its shards.
    """

    def __init__(self, sizes: Sequence[int], shards: Sequence[int], seed: int) -> None:
        hands = np.maximum(np.array(shards), 1)
        self._hand_of = np.cumsum(hands) - hands
        self._orders = list(_orders(sizes, hands.tolist(), seed))

    def places(self, split: Codes, shard: NDArray[np.int32], place: Numbers) -> Numbers:
        """Where in their shards they are written."""
        out = np.empty_like(place)
        for chunk in chunks(len(place)):
            hands = self._hand_of[split[chunk]] + shard[chunk]
            self._mix(hands, place[chunk], out[chunk])
        return out

    def _mix(self, hands: Numbers, place: Numbers, out: Numbers) -> None:
        found, rows, at, _ = alike(hands)
        for hand, chosen in zip(found.tolist(), np.split(rows, at[1:]), strict=True):
            order = self._orders[hand]
            assert order is not None, "a hand with cards"
            out[chosen] = order.at(place[chosen])


def _orders(sizes: Sequence[int], hands: Sequence[int], seed: int) -> Iterator[Order | None]:
    """How each hand is mixed; one without cards is not."""
    for split, (size, count) in enumerate(zip(sizes, hands, strict=True)):
        for number in range(count):
            cards = (size - number + count - 1) // count
            yield Order(key(_TAG, seed, split), number, cards) if cards else None
