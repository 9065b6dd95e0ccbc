"""Sums, broadcasts and barriers, over every kind of connection between the members."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from echelon.comm import Group

from .processes import bits, run, traces

pytestmark = pytest.mark.timeout(120)

WAYS = [
    pytest.param(1, None, "Solo", id="alone"),
    pytest.param(2, None, "Local", id="2 on one host"),
    pytest.param(4, None, "Local", id="4 on one host"),
    pytest.param(3, "abc", "Remote", id="1+1+1"),
    pytest.param(4, "aabb", "TwoLevel", id="2+2"),
    pytest.param(4, "abaa", "TwoLevel", id="3+1"),
]


@pytest.mark.parametrize(("count", "hosts", "kind"), WAYS)
def test_numbers_and_tensors_are_summed_alike_everywhere(
    count: int, hosts: str | None, kind: str
) -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        assert type(collective).__name__ == kind
        assert (collective.index, collective.count) == (group.index, group.count)
        total = sum(range(1, group.count + 1))
        found: list[Any] = []
        for round_ in range(20):
            share = 0.1 * (group.index + 1) + round_
            sums = collective.sum([share, 1.0] if round_ % 2 else [share] * 64)
            assert sums[0] == pytest.approx(0.1 * total + round_ * group.count)
            found.append([value.hex() for value in sums])
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
            for size in (1, 300_001):
                values = torch.full((size,), group.index + 1).to(dtype)
                collective.sum_(values)
                assert bool((values == total).all()), (dtype, size, values[:5])
        ragged = torch.arange(12.0).view(3, 4).t()  # not contiguous
        collective.sum_(ragged)
        assert torch.equal(ragged, torch.arange(12.0).view(3, 4).t() * group.count)
        uneven = torch.rand(1000, generator=torch.Generator().manual_seed(group.index))
        collective.sum_(uneven)
        return [found, bits([uneven])]

    answers = run(count, body, hosts=hosts)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("count", "hosts", "kind"), WAYS)
def test_tensors_of_one_member_come_to_all(count: int, hosts: str | None, kind: str) -> None:  # noqa: ARG001
    def body(group: Group) -> Any:
        collective = group.collective()
        for source in range(group.count):
            value = float(group.index)
            parameter = torch.nn.Parameter(torch.full((2, 3), value))
            last = torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last)
            tensors = [
                parameter,
                torch.tensor(value),
                torch.full((700_001,), value),  # more than is staged at once
                torch.full((5,), group.index, dtype=torch.int64),
                torch.full((0,), value),
                last,
                torch.tensor([group.index % 2 == 0]),
                torch.full((3,), value, dtype=torch.bfloat16),
            ]
            collective.broadcast_(tensors, source)
            for tensor in (*tensors[:4], last, tensors[7]):
                assert bool((tensor == source).all()), (source, tensor)
            assert bool(tensors[6]) == (source % 2 == 0)
            assert last.is_contiguous(memory_format=torch.channels_last)
        collective.broadcast_([])
        collective.barrier()
        return True

    assert all(run(count, body, hosts=hosts))


def test_some_of_the_members_meet_and_several_times() -> None:
    def body(group: Group) -> Any:
        halves = [[0, 1], [2, 3]] if group.index in (0, 1, 2, 3) else []
        mine = next(half for half in halves if group.index in half)
        first, second = group.collective(mine), group.collective(mine)
        odd = group.collective([group.index % 2, group.index % 2 + 2])
        single = group.collective([group.index])
        value = float(2**group.index)
        found = [c.sum([value])[0] for c in (first, odd, second, single)]
        assert odd.index == group.index // 2
        first.close()
        return [*found, second.sum([value])[0]]

    expected = [[3, 5, 3, 1, 3], [3, 10, 3, 2, 3], [12, 5, 12, 4, 12], [12, 10, 12, 8, 12]]
    assert run(4, body) == expected


def test_a_meeting_lets_nobody_through_early() -> None:
    """Judged by the one clock of the host: when a member came to measure its own part, as late
    as a busy machine may make it, does not matter."""

    def body(group: Group) -> Any:
        collective = group.collective()
        collective.barrier()
        if group.index == 1:
            time.sleep(0.3)
        came = time.monotonic()
        collective.barrier()
        return came, time.monotonic()

    met = run(3, body)
    assert min(left for _, left in met) >= max(came for came, _ in met)


def test_members_on_too_few_cores_do_not_crawl() -> None:
    """A member that kept its core while it waits would make each meeting last a time slice.

    Judged by its own time on the core: who else has work there does not matter.
    """

    def body(group: Group) -> Any:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        collective = group.collective()
        sums = collective.gradients([torch.zeros(1000)])
        start = time.process_time()
        for _ in range(100):
            collective.sum([1.0])
            sums.begin([1.0])
            sums.put_all([torch.ones(1000)])
            sums.finish()
        return (time.process_time() - start) / 100

    assert max(run(4, body)) < 0.0015  # 0.15 ms; 3.5 ms where it is kept


@pytest.mark.parametrize(("count", "hosts", "kind"), WAYS)
def test_nothing_is_left_after_closing(count: int, hosts: str | None, kind: str) -> None:  # noqa: ARG001
    def body(group: Group) -> Any:
        group.close()
        group.close()
        return traces()

    def use(group: Group) -> Any:
        collective = group.collective()
        small, large = (collective.gradients([torch.zeros(n)]) for n in (100, 100_000))
        for sums in (small, large):
            sums.begin([1.0])
            sums.put_all(sums.slots)
            sums.finish()
        del sums, small, large
        collective.sum_(torch.zeros(10))
        group.mesh({"all": group.count})
        group.close()
        collective.close()
        del collective
        return traces()

    run(count, use, hosts=hosts)
    bare = run(count, body, hosts=hosts)
    used = run(count, use, hosts=hosts)
    assert bare[0]["segments"] == 0
    assert used == bare


@pytest.mark.parametrize(
    ("machines", "kind"),
    [(["aarch64"] * 3, "Remote"), (["x86_64", "x86_64", "aarch64"], "TwoLevel")],
)
def test_machines_that_order_stores_loosely_go_through_torch(
    machines: list[str], kind: str
) -> None:
    """All members take the same way, also where only one of them is such a machine."""

    def body(group: Group) -> Any:
        collective = group.collective()
        return [type(collective).__name__, collective.sum([1.0])]

    assert run(3, body, machines=machines) == [[kind, [3.0]]] * 3


def test_the_fork_of_a_member_that_closes_its_copy_does_not_leave_for_it() -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        if group.index == 1:
            fork = os.fork()
            if fork == 0:
                group.close()
                os._exit(0)
            os.waitpid(fork, 0)
        collective.barrier()
        return group.collective().sum([1.0])  # the store is whole too

    assert run(2, body) == [[2.0]] * 2
