"""Parts good records from bad ones in a block that has both.

Whether a record is bad is what the parser says of it alone: a good one comes through whatever is
beside it, and the same as from a block without bad ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare.blocks import Block
from echelon.data.prepare.parse.parsed import Bad, Parsed, empty, shown
from echelon.data.prepare.scan import Spans


class Sieve:
    """The records of a block, and why some of them are bad.

    `read` gives a batch with a row for each of some joined records, or None; `refusal` says what
    is wrong with one.
    """

    def __init__(
        self,
        data: bytes,
        spans: Spans,
        read: Callable[[bytes], Any | None],
        refusal: Callable[[bytes], str | None],
    ) -> None:
        bounds = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
        self.records = [data[start:end] for start, end in bounds]
        self.reasons: dict[int, str] = {}
        self._lines = spans.lines
        self._read = read
        self._refusal = refusal

    def rest(self) -> list[int]:
        """Records that are not known to be bad."""
        return [row for row in range(len(self.records)) if row not in self.reasons]

    def joined(self, rows: Sequence[int]) -> bytes:
        return b"\n".join([self.records[row] for row in rows])

    def try_alone(self, suspect: Callable[[bytes], bool]) -> None:
        """Ask about each record that is suspect."""
        for row in self.rest():
            record = self.records[row]
            if suspect(record) and (reason := self._refusal(record)):
                self.reasons[row] = reason

    def parsed(self, block: Block, wanted: pa.Schema) -> Parsed:
        """All that can be read, in order, and all that cannot."""
        batches = list(self._halved(self.rest()))
        batch = pa.concat_batches(batches) if batches else empty(wanted)
        lines = block.record + self._lines
        bad = [
            Bad(block.file, int(lines[row]), self.reasons[row], shown(self.records[row]))
            for row in sorted(self.reasons)
        ]
        return Parsed(batch, lines[np.array(self.rest(), np.int64)], bad)

    def _halved(self, rows: list[int]) -> Iterator[Any]:
        """What can be read of these: a part that cannot is halved until a bad one is alone."""
        if not rows:
            return
        batch = self._read(self.joined(rows))
        if batch is not None and batch.num_rows == len(rows):
            yield batch
        elif len(rows) == 1:
            self.reasons[rows[0]] = self._refusal(self.records[rows[0]]) or "it cannot be read"
        else:
            half = len(rows) // 2
            yield from self._halved(rows[:half])
            yield from self._halved(rows[half:])
