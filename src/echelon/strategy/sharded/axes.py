"""Who shares what with whom: the members along the mesh's axes."""

from __future__ import annotations

import torch

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.types import Parallel


def lengths(parallel: Parallel, axis: str, count: int) -> tuple[int, int]:
    """Members along `data` and along `axis`; all along the latter if there is no mesh."""
    data = parallel.mesh.get("data", 1)
    along = parallel.mesh.get(axis, count // data)
    assert data * along == count, f"a mesh of {data} × {along} for {count} members"
    return data, along


def sharded_group(
    comm: Group, everybody: Collective, parallel: Parallel, device: torch.device
) -> Collective:
    """The members that hold one model between them, this one among them."""
    data, along = lengths(parallel, "sharded", comm.count)
    if data == 1:
        return everybody
    first = comm.index // along * along
    return comm.collective(range(first, first + along), device=device)
