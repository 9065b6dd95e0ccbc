"""Named segments; memfd over unix sockets.

Memory that the members of one host have in common.

One of them makes a file that lives in memory alone and has no name in any folder, so that nothing
is left behind however a member ends. The others open it through that member's /proc entry. It is
mapped by torch: no descriptor stays open, and the memory goes with the last tensor that shows it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.comm.peers import Peer, Rendezvous
from echelon.core.errors import PeerError

# --- segment ---

PAGE = 4096


def share(
    meeting: Rendezvous,
    key: str,
    members: Sequence[Peer],
    size: int,
    look: Callable[[int], None] | None = None,
) -> Tensor:
    """`size` zero bytes, the same for all these members; the first of them makes them."""
    owner = members[0]
    mine = owner.index == meeting.index
    name = f"echelon-{secrets.token_hex(8)}"
    descriptor = _create(name, size) if mine else -1
    try:
        [line] = meeting.gather(f"{key}/file", [owner.index], f"{descriptor} {name}", look)
        number, _, name = line.partition(" ")
        memory = _map(f"/proc/{owner.pid}/fd/{number}", name, size, owner)
        # The owner's descriptor has to stay until all have come through it.
        if mine:
            meeting.gather(f"{key}/open", [member.index for member in members], "", look)
        else:
            meeting.say(f"{key}/open/{meeting.index}")
    finally:
        if mine:
            os.close(descriptor)
    return memory


def prefault(memory: Tensor, own: Tensor) -> None:
    """Touch every page now, not in the first update: a first touch costs more than a copy.

    Only what is this member's `own` is written: others may already be at work in the rest.
    """
    own[::PAGE].zero_()
    memory[::PAGE].sum()


def _create(name: str, size: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def _map(path: str, name: str, size: int, owner: Peer) -> Tensor:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerError(
            f"the memory of {owner} cannot be opened ({error.strerror}): "
            "do all members run as the same user, in the same container?"
        ) from None
    here = f"/proc/self/fd/{descriptor}"
    try:
        # An owner that has left meanwhile may have another file under this number.
        if not str(Path(here).readlink()).startswith(f"/memfd:{name}"):
            raise PeerError(f"{owner} has left before all had come")
        return torch.from_file(here, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)


# --- memory ---
# Memory that two processes of one host share, handed over a unix socket.
#
# It has no name in any folder, so nothing is left behind however a process ends. Its size is
# sealed before it is handed on: a peer cannot cut it off under a reader, who would die of SIGBUS.

MEMORY_PAGE = 4096
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
        segment.tensor[::MEMORY_PAGE].zero_()
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
        segment.tensor[::MEMORY_PAGE].sum()
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
