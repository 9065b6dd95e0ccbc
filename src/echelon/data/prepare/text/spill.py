"""More counts than fit into memory: kept on disk, parted by hash, merged part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare.text.hashes import Hashes, hashes
from echelon.data.prepare.text.records import Records, merged

_PARTS = 256
_MEMORY = 32 << 20
"""Bytes of records that are not on disk."""


class Spill:
    """Records of all blocks; as long as there are few different terms no file is written."""

    def __init__(self, scratch: Path, kind: np.dtype[Any]) -> None:
        self._scratch = scratch
        self._held: list[Records] = [np.empty(0, kind)]
        self._kind = kind
        self._size = 0
        self._on_disk = False
        for number in range(_PARTS):  # a run that was killed may have left some
            self._path(number).unlink(missing_ok=True)

    def add(self, records: Records) -> None:
        self._held.append(records)
        self._size += records.nbytes
        if self._size <= _MEMORY:
            return
        self._held = [merged(self._held)]
        self._size = self._held[0].nbytes
        if self._size > _MEMORY // 2:
            self._write()

    def parts(self) -> Iterator[Records]:
        """All terms, each once (and once per group), those of near hashes together."""
        if not self._on_disk:
            yield merged(self._held)
            return
        self._held = [merged(self._held)]
        self._write()
        for number in range(_PARTS):
            path = self._path(number)
            if path.exists():
                yield merged([np.fromfile(path, self._kind)])
                path.unlink()

    def _write(self) -> None:
        records = self._held[0]
        starts = np.arange(_PARTS, dtype=np.uint64) << np.uint64(56)
        cuts = [*np.searchsorted(records["hash"], starts).tolist(), len(records)]
        for number in range(_PARTS):
            some = records[cuts[number] : cuts[number + 1]]
            if len(some):
                with self._path(number).open("ab") as file:
                    some.tofile(file)
        self._held, self._size, self._on_disk = [records[:0]], 0, True

    def _path(self, number: int) -> Path:
        return self._scratch / f"terms-{number:03}"


class Words:
    """The words that hashes stand for, block after block in one file."""

    def __init__(self, scratch: Path) -> None:
        self._path = scratch / "words.arrow"
        self._schema = pa.schema({"hash": pa.uint64(), "word": pa.large_utf8()})
        self._file = pa.OSFile(str(self._path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def add(self, words: Any) -> None:
        columns = [pa.array(hashes(words)), words]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))

    def close(self) -> None:
        if not self._file.closed:
            self._stream.close()
            self._file.close()

    def of(self, wanted: Hashes) -> Any:
        """The words of these hashes, an Arrow array in the same order."""
        self.close()
        needed, places = np.unique(wanted, return_inverse=True)
        missing = np.ones(len(needed), bool)
        numbers, found = [np.empty(0, np.int64)], [pa.array([], pa.large_utf8())]
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                here = batch.column(0).to_numpy()
                at = np.searchsorted(needed, here)
                at[at == len(needed)] = 0
                new = np.flatnonzero((needed[at] == here) & missing[at]) if len(needed) else at[:0]
                missing[at[new]] = False
                numbers.append(at[new])
                found.append(batch.column(1).take(pa.array(new)))
        assert not missing.any(), "every term's words were counted"
        order = np.empty(len(needed), np.int64)
        order[np.concatenate(numbers)] = np.arange(len(needed))
        return pa.concat_arrays(found).take(pa.array(order[places]))
