"""A fork is made safe, or refused in one line."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from echelon.cluster import environment
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.core.errors import UserError

pytestmark = pytest.mark.timeout(120)


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_kernels_on_several_threads_work_before_in_and_after_members() -> None:
    torch.set_num_threads(2)
    a, x = torch.randn(300, 300), torch.randn(1 << 20)
    w = torch.randn(64, 64, requires_grad=True)

    def compute() -> float:
        (w @ w).sum().backward()
        return float((x * 2).sum() + (a @ a).sum())

    expected = compute()

    def work(_: Member) -> dict[str, Any]:
        torch.set_num_threads(2)
        before = native_threads()
        total = compute()
        return {"total": total, "threads": native_threads() - before}

    found = launch(2, work, deadline=5)
    assert found["threads"] == 1  # it was not computed on one thread only
    assert found["total"] == pytest.approx(expected)
    assert compute() == pytest.approx(expected)


def test_pools_of_numpy_and_arrow_work_before_and_in_members() -> None:
    def compute() -> float:
        square = np.ones((600, 600))
        table = pa.table({"x": np.arange(100_000), "y": np.arange(100_000) % 7})
        sums = table.group_by("y").aggregate([("x", "sum")])
        return float((square @ square).sum() + sum(sums["x_sum"].to_pylist()))

    expected = compute()
    assert launch(2, lambda _: {"total": compute()}, deadline=5) == {"total": expected}


def test_kernel_threads_that_cannot_be_paused_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without = ctypes.CDLL("libm.so.6")
    monkeypatch.setattr(environment, "_openmp", lambda: [without])
    with pytest.raises(UserError, match="OMP_NUM_THREADS=1"):
        launch(2, lambda _: {}, deadline=5)


def test_cuda_in_the_parent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"after CUDA was used.*torchrun"):
        launch(2, lambda _: {}, deadline=5)


def test_a_member_of_another_group_is_refused() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=5))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="destroy_process_group"):
            launch(2, lambda _: {}, deadline=5)
    finally:
        dist.destroy_process_group()
