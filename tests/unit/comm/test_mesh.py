"""torch's own global group and device mesh between the members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from echelon.comm import Group, Place, process_group
from echelon.core.errors import PeerError, UserError

from .processes import run

pytestmark = pytest.mark.timeout(120)


def test_a_mesh_is_laid_out_with_its_first_axis_outermost() -> None:
    def body(group: Group) -> Any:
        grid = group.mesh({"data": 2, "tensor": 2})
        assert grid.mesh_dim_names == ("data", "tensor")
        value = torch.tensor([float(2**group.index)])
        found = []
        for axis in ("data", "tensor"):
            total = value.clone()
            dist.all_reduce(total, group=grid.get_group(axis))
            found.append(float(total))
        again = group.mesh({"all": 4})
        assert again.size() == 4
        group.close()
        assert not dist.is_initialized()
        return found

    assert run(4, body) == [[5, 3], [10, 3], [5, 12], [10, 12]]


def listening() -> set[str]:
    """Addresses at which this process can be reached, in the kernel's digits."""
    held = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()}
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in lines.splitlines()]
    return {
        row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held
    }


def test_its_gloo_listens_on_the_way_to_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [path.name for path in Path("/sys/class/net").glob("e*")]
    if outside:  # where it would listen of itself
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside[0])

    def body(group: Group) -> Any:
        before = listening()
        grid = group.mesh({"all": 2})
        dist.all_reduce(torch.ones(1), group=grid.get_group("all"))
        return [sorted(before), sorted(listening())]

    loopback = "0100007F"
    assert run(2, body) == [[[loopback], [loopback]], [[], [loopback]]]


def test_a_process_that_is_in_a_group_of_its_own_is_told() -> None:
    def body(group: Group) -> Any:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with pytest.raises(UserError, match=r"a member of a torch\.distributed group of its own"):
            group.mesh({"all": 1})
        group.close()
        return dist.is_initialized()

    assert run(1, body) == [True]


def test_members_that_torch_cannot_connect_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "interface_of", lambda _address: "nosuch0")
    group = Group(Place(0, 1))
    with pytest.raises(PeerError, match=r"torch could not connect all 1 members: .*nosuch0"):
        group.mesh({"all": 1})
    group.close()
    assert not dist.is_initialized()
