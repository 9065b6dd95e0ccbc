"""Memory that two processes of one host share, handed over a unix socket.

It has no name in any folder, so nothing is left behind however a process ends. Its size is sealed
before it is handed on: a peer cannot cut it off under a reader, who would die of SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import torch
from torch import Tensor

from echelon.core.errors import PeerError

PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Bytes as a tensor. The memory lives as long as any tensor shows it, the descriptor until
    `close`: whoever hands the segment to more peers keeps it open."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.tensor: Tensor = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        )

    @classmethod
    def create(cls, size: int) -> Segment:
        """Zeros, all pages there already: a first touch costs more than a copy."""
        if size < 1:
            raise ValueError(f"a segment of {size} bytes: at least one is needed")
        # The kernel would not say no: it would end processes until there is room.
        if size > (free := _free()):
            raise PeerError(f"no shared memory of {size:,} bytes: {free:,} are free")
        descriptor = os.memfd_create("echelon-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise PeerError(f"no shared memory of {size:,} bytes: {error.strerror}") from None
        segment.tensor[::PAGE].zero_()
        return segment

    @classmethod
    def from_descriptor(cls, descriptor: int, size: int) -> Segment:
        """One that came from a peer, who may have sent anything. Takes the descriptor over."""
        try:
            _look(descriptor, size)
            segment = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        segment.tensor[::PAGE].sum()
        return segment

    def close(self) -> None:
        """Hand it to nobody any more. Tensors of it stay."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never whole
            self.close()


def _free() -> int:
    """Bytes that this host can give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def _look(descriptor: int, size: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise PeerError("a descriptor that came is not of shared memory") from None
    if seals != _SEALS:  # more of them, and it could not be written
        raise PeerError("shared memory that came may still change its size, or may not be written")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise PeerError(f"shared memory that came has {found:,} bytes, not {size:,}")
