"""Memory that the members of one host have in common.

One of them makes a file that lives in memory alone and has no name in any folder, so that nothing
is left behind however a member ends. The others open it through that member's /proc entry. It is
mapped by torch: no descriptor stays open, and the memory goes with the last tensor that shows it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.comm.peers import Peer
from echelon.comm.rendezvous import Rendezvous
from echelon.core.errors import PeerError

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
