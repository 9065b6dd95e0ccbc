"""Members of one machine listen on loopback only."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member

pytestmark = pytest.mark.timeout(120)


def addresses() -> list[str]:
    """Where this process listens, as the kernel knows it."""
    lines = subprocess.run(
        ["ss", "-Hltnp"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    mine = [line.split()[3] for line in lines if f"pid={os.getpid()}," in line]
    return [address.rpartition(":")[0] for address in mine]


def test_gloo_and_the_store_are_not_reachable_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = [path.name for path in Path("/sys/class/net").glob("e*")]
    if outside:  # even if that is what the shell asks for
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside[0])

    def work(member: Member) -> dict[str, Any]:
        place = member.place
        store = TCPStore(
            place.host,
            place.port,
            place.count,
            is_master=place.index == 0,
            timeout=timedelta(seconds=place.deadline),
            master_listen_fd=place.listener,
        )
        dist.init_process_group("gloo", store=store, rank=place.index, world_size=place.count)
        total = torch.tensor([float(place.index)])
        dist.all_reduce(total)
        found = addresses()
        dist.barrier()
        dist.destroy_process_group()
        assert found, "nobody listens: this shows nothing"
        assert set(found) <= {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}, found
        return {"total": float(total), "found": found}

    found = launch(3, work, deadline=30)
    assert found["total"] == 3.0
    assert len(found["found"]) >= 2  # the store's and gloo's
