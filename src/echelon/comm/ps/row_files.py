"""All rows of a table on their way into a checkpoint: in memory, or in a file if there is a folder.

    shard 0  ┌ ids ─▶ ┌──────┬──────┐          each column has its place from the start, and fills
             └ rows ─▶├──────┴──┬───┴──────┐   up shard by shard, in pieces of a few MB
    shard 1  …        └─────────┴──────────┘

`Spool` makes one `Columns` for each table of a checkpoint. A file is mapped as the tensors of the
table, so that no process has to hold all rows; the checkpoint takes the file itself.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from echelon.core import files
from echelon.core.errors import CheckpointError

State = dict[str, Tensor]

_ALIGNMENT = 64
_NUMBERS = itertools.count()


class Spool:
    """The files of one process, in the folder of its checkpoints."""

    folder: Path | None = None
    """None: rows stay in memory."""

    def __init__(self) -> None:
        self._cuts: list[list[Path]] = []

    def begin(self) -> None:
        """Begin another checkpoint, and delete all files but those of the last one.

        That one may still be on its way to the disk.
        """
        self._drop(1)
        if self.folder is not None:
            own = set(itertools.chain(*self._cuts))
            for left_behind in set(self.folder.glob(f"{files.START}*")) - own:
                left_behind.unlink(missing_ok=True)  # by an earlier leader that was killed
        self._cuts.append([])

    def columns(self, blank: Mapping[str, Tensor]) -> Columns:
        """Return room for the rows of a table.

        It is in memory if the file cannot be made: writing the checkpoint will report that error.
        """
        if self.folder is None:
            return InMemory(blank)
        path = self.folder / f"{files.START}{os.getpid()}-{next(_NUMBERS)}"
        self._cuts[-1].append(path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return InFile(blank, path)
        except OSError:
            return InMemory(blank)

    def close(self) -> None:
        self._drop(0)

    def _drop(self, kept: int) -> None:
        while len(self._cuts) > kept:
            for path in self._cuts.pop(0):
                path.unlink(missing_ok=True)


class Columns(Protocol):
    """Room for the rows that all shards have of one table."""

    def add(self, part: Mapping[str, Tensor]) -> None:
        """Append a shard's rows to those that are there."""
        ...

    def whole(self) -> State:
        """Return all rows. Call it before `close`."""
        ...

    def close(self) -> None:
        """Close the file. Nothing may be added any more; the tensors of `whole` stay valid."""


class InMemory:
    """Columns in memory."""

    def __init__(self, blank: Mapping[str, Tensor]) -> None:
        self._whole = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in blank.items()}
        self._filled = dict.fromkeys(blank, 0)

    def add(self, part: Mapping[str, Tensor]) -> None:
        for name, value in part.items():
            start = 0 if name == "facts" else self._filled[name]
            self._whole[name][start : start + len(value)] = value
            self._filled[name] = start + len(value)

    def whole(self) -> State:
        return self._whole

    def close(self) -> None:
        """Do nothing: there is no file."""


class InFile:
    """Columns in a file, which the second `Spool.begin` after it deletes.

    By then its checkpoint is written.
    """

    def __init__(self, blank: Mapping[str, Tensor], path: Path) -> None:
        self._blank, self._path = dict(blank), path
        places = _places(blank)
        self._places = dict(zip(blank, places, strict=False))
        self._filled = dict.fromkeys(blank, 0)
        self._size = places[-1]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(self._file, 0, self._size)
        except OSError:
            os.close(self._file)
            raise

    def add(self, part: Mapping[str, Tensor]) -> None:
        for name, value in part.items():
            start = 0 if name == "facts" else self._filled[name]
            self._write(value, self._places[name] + start)
            self._filled[name] = start + value.nbytes

    def _write(self, value: Tensor, at: int) -> None:
        left = value.contiguous().view(-1).view(torch.uint8).numpy().data
        while len(left):
            try:
                done = os.pwrite(self._file, left, at)
            except OSError as error:
                raise CheckpointError(f"cannot write rows to {self._path}: {error}") from error
            left, at = left[done:], at + done

    def close(self) -> None:
        os.close(self._file)

    def whole(self) -> State:
        """Return the rows in the file that was written, even if its name is gone by now."""
        memory = self._mapped(self._path)
        if not os.fstat(self._file).st_nlink:  # deleted: the name may be another file's
            memory = self._mapped(Path(f"/proc/self/fd/{self._file}"))
        return placed(self._blank, memory)

    def _mapped(self, path: Path) -> Tensor:
        return torch.from_file(str(path), shared=True, size=self._size, dtype=torch.uint8)


def scratch(size: int) -> Tensor:
    """Return memory for a piece of `size` bytes, which goes back to the system with its last user.

    It has room to align up to 32 columns: see `placed`.
    """
    room = mmap.mmap(-1, size + 32 * _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=torch.uint8)


def placed(blank: Mapping[str, Tensor], memory: Tensor) -> State:
    """Return tensors like `blank`, one behind the other in `memory`."""
    return {
        name: memory[place : place + value.nbytes].view(value.dtype).view(value.shape)
        for (name, value), place in zip(blank.items(), _places(blank), strict=False)
    }


def _places(blank: Mapping[str, Tensor]) -> list[int]:
    """Return the place of each tensor, and the end of the last one."""
    sizes = (-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in blank.values())
    return list(itertools.accumulate(sizes, initial=0))
