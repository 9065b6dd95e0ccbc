"""Records that are there before, exactly or nearly: of those alike the first stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.clean import minhash
from echelon.data.prepare.clean.fingerprint import fingerprints
from echelon.data.prepare.clean.repeats import Links, Numbers, Shelf, met
from echelon.data.prepare.step import Step, is_text

_PAIRS = 1 << 14
"""Pairs compared at a time."""


class Duplicates(Step):
    """Drop records whose columns are those of an earlier one, or nearly so.

    `near` is the part of their runs of five characters that two texts share: 0.8 is one word in
    twenty changed. Chains count: what is near a dropped record goes too.
    """

    kind: Literal["duplicates"] = "duplicates"
    columns: tuple[str, ...] | None = None
    """What is compared; all columns if not given."""
    near: Annotated[float, Field(ge=0.3, lt=1)] | None = None

    def reads(self) -> list[str]:
        return list(self.columns or ())

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        texts = [name for name in self.columns or names if is_text(names[name])]
        if self.near is not None and not texts:
            raise DataError("step duplicates: near compares texts: name columns of text")
        return after

    def hashes(self, block: pa.RecordBatch) -> dict[str, Any]:
        """A few numbers for each row, to compare it with all others by."""
        names = self.columns or tuple(block.schema.names)
        chosen = [block.column(name) for name in names]
        if self.near is None:
            return {"exact": fingerprints(chosen)}
        texts = [column for column in chosen if is_text(column.type)]
        others = [column for column in chosen if not is_text(column.type)]
        bands, marks = minhash.sketched(_joined(texts), self.near)
        if others:  # what is no text must be the same
            bands ^= (fingerprints(others)[:, :1] >> np.uint64(32)).astype(np.uint32)
        return {"bands": bands, "marks": marks}

    def duplicates(self, keys: Iterable[Mapping[str, Any]], scratch: Path) -> Numbers:
        """For each record −1, or the number of the first one it repeats.

        `keys` are what `hashes` gave of all blocks in order; memory does not grow with them.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        return _exact(keys, scratch) if self.near is None else _near(keys, scratch, self.near)


def _joined(texts: list[Any]) -> Any:
    plain = [text.fill_null("").cast(pa.large_utf8()) for text in texts]
    if len(plain) == 1:
        return plain[0]
    return pc.binary_join_element_wise(*plain, pa.scalar("\n", pa.large_utf8()))


def _exact(keys: Iterable[Mapping[str, Any]], scratch: Path) -> Numbers:
    shelf = Shelf(scratch / "exact", np.uint64, 2)
    for one in keys:
        shelf.add(one["exact"])
    links = Links(shelf.rows, scratch / "first")
    for later, first, _ in met(shelf):
        links.first[later] = first
    return links.first


def _near(keys: Iterable[Mapping[str, Any]], scratch: Path, near: float) -> Numbers:
    count, _ = minhash.banding(near)
    bands = [Shelf(scratch / f"band-{band}", np.uint32) for band in range(count)]
    marks = Shelf(scratch / "marks", np.uint8, minhash.BINS)
    for one in keys:
        marks.add(one["marks"])
        for band, shelf in enumerate(bands):
            shelf.add(one["bands"][:, band])
    links = Links(marks.rows, scratch / "first")
    for shelf in bands:
        for later, first, before in met(shelf):
            # In a large group not all pairs are looked at: other bands bring others together.
            for other in (first, before):
                _join_alike(links, marks, other, later, near)
    return links.settled()


def _join_alike(links: Links, marks: Shelf, left: Numbers, right: Numbers, near: float) -> None:
    """Join the pairs that are not yet, and are near each other indeed."""
    for start in range(0, len(left), _PAIRS):
        a, b = left[start : start + _PAIRS], right[start : start + _PAIRS]
        new = links.roots(a) != links.roots(b)
        a, b = a[new], b[new]
        if not len(a):
            continue
        near_enough = minhash.alike(*marks.taken(a, b)) >= near
        if near_enough.any():
            links.join(a[near_enough], b[near_enough])
