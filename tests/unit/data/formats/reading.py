"""Read inputs with the block parsers, as the engine of recipes does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from echelon.data.formats import Bad, arrow_type, blocks, infer, parse
from echelon.data.formats.records import SIZE, Block, Input


class Result(NamedTuple):
    """Records, bad records, schema and blocks of some inputs."""

    rows: list[dict[str, Any]]
    places: list[tuple[str, int]]
    bad: list[Bad]
    schema: pa.Schema
    blocks: list[Block]

    @property
    def lines(self) -> list[int]:
        return [line for _, line in self.places]

    @property
    def read(self) -> int:
        return len(self.rows) + sum(bad.records for bad in self.bad)

    def messages(self) -> list[str]:
        """Return `FILE:LINE: reason` of all bad records, with the name of the file alone."""
        return [f"{Path(bad.file).name}:{bad.line}: {bad.reason}" for bad in self.bad]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def collect(
    *paths: Path | str | Input,
    size: int = SIZE,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> Result:
    inputs = [
        path if isinstance(path, Input) else Input(path=str(path), **options) for path in paths
    ]
    found = list(blocks(inputs, size))
    schemas = (infer(block, columns or {}) for block in found)
    schema = next((one for one in schemas if one is not None), None)
    if schema is None:
        schema = pa.schema(
            [(name, arrow_type(name, kind)) for name, kind in (columns or {}).items()]
        )
    result = Result([], [], [], schema, found)
    for block in found:
        parsed = parse(block, schema)
        assert len(parsed.lines) == parsed.batch.num_rows
        parsed.batch.validate(full=True)
        result.rows.extend(parsed.batch.to_pylist())
        result.places.extend(block.locate(line) for line in parsed.lines.tolist())
        result.bad.extend(parsed.bad)
    return result
