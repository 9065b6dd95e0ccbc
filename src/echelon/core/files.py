"""Write files and folders so that a crash leaves the old contents or the new, never a mixture.

New contents go under a temporary name beside the target and are renamed when they are complete:

    write .NAME.part  →  fsync, if it must survive a power cut  →  rename to NAME

Checksums of files are computed here too, because they are what detects a damaged file later.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 4 << 20
"""Bytes read at a time for a checksum."""


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` unless the block raises.

    `durable` waits until the contents are on disk before renaming: without it, a power cut just
    after the rename may leave an empty file under the final name.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        if durable:
            fsync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Write a whole file, text as UTF-8."""
    with replacing(path, durable=durable) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, in place of what is there.

    A reader finds the old folder, none for an instant, or the new one. If renaming fails, the old
    folder is put back.
    """
    old = None
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old is not None:
            old.rename(folder)
        raise
    fsync(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def fsync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_file(path: Path, proceed: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Size and crc32 of a file. `proceed` is called before each chunk; it may raise to stop."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            proceed()
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return size, checksum


def crc32_blocks(path: Path, block: int) -> list[int]:
    """The crc32 of each `block` bytes of a file; the last block may be shorter."""
    with path.open("rb") as file:
        return [zlib.crc32(data) for data in iter(lambda: file.read(block), b"")]


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Some tensors lie in files because a process should not have to hold them. The writer of such a
# file maps it as a tensor; a checkpoint takes the file itself and does not copy its contents.

START = ".spool-"
"""How the names of such files begin."""


def file_of(tensor: Tensor) -> Path | None:
    """The file that holds a contiguous tensor; None if it lies in memory."""
    name = None if tensor.device.type != "cpu" else tensor.untyped_storage().filename
    if name is None or not tensor.is_contiguous():
        return None
    path = Path(name)
    return path if path.name.startswith(START) else None
