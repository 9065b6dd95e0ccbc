"""Memory that processes of one host share.

Both kinds are files that live in memory alone (memfd) and have no name in any folder, so that
nothing is left behind however a process ends. torch maps them, and the memory goes with the last
tensor that shows it.

`share` gives all members of a group the same memory. The first member makes the file, the others
open it through that member's /proc entry, and no descriptor stays open.

`Segment` is memory that one process hands to a peer over a unix socket. Its size is sealed before
it is handed on: otherwise a peer could truncate the file under a reader, which would die of SIGBUS.
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

PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def share(
    meeting: Rendezvous,
    key: str,
    members: Sequence[Peer],
    size: int,
    look: Callable[[int], None] | None = None,
) -> Tensor:
    """Return `size` zero bytes that these members share. All of them call it.

    `look(member)` is called while that one is awaited: it raises if the member cannot come.
    """
    owner = members[0]
    mine = owner.index == meeting.index
    name = f"echelon-{secrets.token_hex(8)}"
    descriptor = _create(name, size) if mine else -1
    try:
        [line] = meeting.gather(f"{key}/file", [owner.index], f"{descriptor} {name}", look)
        number, _, name = line.partition(" ")
        memory = _map(f"/proc/{owner.pid}/fd/{number}", name, size, owner)
        # The owner's descriptor has to stay open until all members have opened the file through it.
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

    Only this member's `own` part is written: others may already be writing to the rest.
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
        # The owner may have left meanwhile, and another file may have got this number.
        if not str(Path(here).readlink()).startswith(f"/memfd:{name}"):
            raise PeerError(f"{owner} has left before all had come")
        return torch.from_file(here, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)


class Segment:
    """Shared memory as a tensor of bytes, and the descriptor that hands it to a peer.

    The memory lives as long as any tensor shows it. The descriptor lives until `close`: keep the
    segment open to hand it to more peers.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.tensor: Tensor = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        )

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make a segment of zeros with all pages present: a first touch costs more than a copy."""
        if size < 1:
            raise ValueError(f"a segment of {size} bytes: at least one is needed")
        # The kernel would not refuse: it would kill processes until there is room.
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
        """Map a segment received from a peer, which is checked first. Owns the descriptor."""
        try:
            _look(descriptor, size)
            segment = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        segment.tensor[::PAGE].sum()
        return segment

    def close(self) -> None:
        """Close the descriptor. Tensors of the segment stay valid."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ failed
            self.close()


def _free() -> int:
    """Return how many bytes this host has available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def _look(descriptor: int, size: int) -> None:
    """Raise unless a peer's descriptor is shared memory of this size, sealed and writable."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise PeerError("a descriptor that came is not of shared memory") from None
    if seals != _SEALS:  # one seal more, and the memory could not be written
        raise PeerError("shared memory that came may still change its size, or may not be written")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise PeerError(f"shared memory that came has {found:,} bytes, not {size:,}")
