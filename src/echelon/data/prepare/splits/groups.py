"""Records that stay together: groups are divided as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.prepare.splits.nth import sortable
from echelon.data.prepare.splits.part import FREE, Codes, Numbers, Part, Parts, given_key
from echelon.data.prepare.splits.table import Table
from echelon.data.split import edges

_TAG = 0x5911


class Groups:
    """The split of every group: those that have one already, and whom `cut` gives one."""

    def __init__(self, parts: Parts) -> None:
        self._table = Table.of(given_key(part) for part in parts())
        self.splits = self._known(parts)
        self.free: Numbers = np.flatnonzero(self.splits == FREE)

    def next(self, part: Part) -> Codes:
        return self.splits[self._table.numbers(given_key(part))]

    def cut(self, shares: Sequence[float], seed: int) -> tuple[Numbers, Numbers]:
        """Free groups, shuffled, and the number of the share that each one falls to."""
        hashes = words(sortable(self._table.keys[self.free]), key(_TAG, seed))
        order = self.free[hashes.argsort()]
        sizes = self._table.sizes[order]
        # One after the other; whoever holds a group's middle gets the group.
        middles = sizes.cumsum() - sizes / 2
        wanted = np.array(edges(int(sizes.sum()), shares)[1:-1])
        cuts = _room_for_all(np.searchsorted(middles, wanted), shares, len(order))
        return order, np.searchsorted(cuts, np.arange(len(order)), "right")

    def _known(self, parts: Parts) -> Codes:
        """The split of each group that has one already: its other records go there too."""
        known = np.full(len(self._table.keys), FREE, np.int8)
        passed = 0
        for part in parts():
            have = np.flatnonzero(part.split != FREE)
            numbers, given = self._table.numbers(given_key(part)[have]), part.split[have]
            before = known[numbers]
            known[numbers] = given
            clash = ((before != FREE) & (before != given)) | (known[numbers] != given)
            if clash.any():
                _refuse(passed + int(have[clash.argmax()]))
            passed += len(part.split)
        return known


def _refuse(record: int) -> None:
    raise DataError(
        f"split by group: the inputs have put the group of record {record} into several splits"
    )


def _room_for_all(cuts: NDArray[Any], shares: Sequence[float], count: int) -> NDArray[Any]:
    """Cuts that leave everybody who has a share at least one of `count` groups."""
    wanted = [int(share > 0) for share in shares]
    if count < sum(wanted):
        return cuts
    left = sum(wanted)
    for at in range(len(cuts)):
        before = int(cuts[at - 1]) if at else 0
        left -= wanted[at]
        cuts[at] = min(max(int(cuts[at]), before + wanted[at]), count - left)
    return cuts
