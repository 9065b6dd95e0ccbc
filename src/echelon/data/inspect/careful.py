"""Files that hold something bad, read as a preparation reads them: the rest can be looked at."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from echelon.data.inspect.profile import Unread
from echelon.data.inspect.sources import Source
from echelon.data.prepare.blocks import Block, blocks
from echelon.data.prepare.inputs import OPTIONS, Input
from echelon.data.prepare.parse import Bad, infer, parse

_FORMATS = ("csv", "tsv", "jsonl", "libsvm", "text")


class Careful:
    """A part in which a reader has met something bad."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.unread = Unread()

    @property
    def possible(self) -> bool:
        """Whether this format is one of lines, and its settings are those of a recipe."""
        known = OPTIONS.get(self._source.format, frozenset())
        return (
            self._source.format in _FORMATS
            and self._source.options.keys() <= known
            and all(path.is_file() for path in self._source.paths)
        )

    def batches(self) -> Generator[tuple[str, Any]]:
        """Record batches of what can be read, by the columns of the first block that has any."""
        schema = None
        for block in self._blocks():
            schema = schema if schema is not None else infer(block, {})
            if schema is None:
                reason = block.fault or "nothing in it can be read"
                self._add(Bad(block.file, block.record, reason, records=0))
                continue
            parsed = parse(block, schema)
            for bad in parsed.bad:
                self._add(bad)
            if parsed.batch.num_rows:
                yield block.file, parsed.batch

    def _add(self, bad: Bad) -> None:
        self.unread = self.unread.and_(str(bad), bad.records)

    def _blocks(self) -> Iterator[Block]:
        settings = {"format": self._source.format, **self._source.options}
        inputs = [Input(path=str(path), **settings) for path in self._source.paths]
        return blocks(inputs)
