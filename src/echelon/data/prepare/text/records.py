"""Counts of terms as records of a fixed size, merged by the terms' hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]
"""Fields: `hash`; `group`, a class, if classes are told apart; `count`, all occurrences; `texts`,
those that have the term; `tokens`, the hashes of its tokens, if it can have several."""


def record_type(n: int, *, grouped: bool) -> np.dtype[Any]:
    fields: list[Any] = [("hash", "<u8"), ("count", "<u8"), ("texts", "<u8")]
    if grouped:
        fields.append(("group", "<u4"))
    if n > 1:
        fields.append(("tokens", "<u8", (n,)))
    return np.dtype(fields)


def merged(parts: Sequence[Records]) -> Records:
    """One record for each term (and group), in the order of the hashes."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not len(whole):
        return whole
    order = np.argsort(whole["hash"])
    new = is_new(whole["hash"][order])
    if "group" in (whole.dtype.names or ()):
        group = whole["group"][order].astype(np.int64)
        # Nearly in order already: what a stable sort is quick at.
        finer = np.cumsum(new) * (int(group.max()) + 1) + group
        within = np.argsort(finer, kind="stable")
        order, new = order[within], is_new(finer[within])
    firsts = np.flatnonzero(new)
    out = whole[order[firsts]]
    if len(firsts) < len(whole):
        for field in ("count", "texts"):
            out[field] = np.add.reduceat(whole[field][order], firsts)
    return out


def is_new(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a sorted array has something that was not there before."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new
