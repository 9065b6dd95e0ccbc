"""Gradients of all members meet: the mean is right, the same bits everywhere, whatever the way."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm import Collective, Group, local, private, sliced
from echelon.comm.interface import GradientSum

from .processes import bits, run

pytestmark = pytest.mark.timeout(120)

TINY = [(3,), (), (5, 2)]
UNEVEN = [(17, 31), (1,), (), (129, 257), (64,), (60, 1000)]  # more than the small way takes
LARGE = [(250, 200), (7,), (150, 200), (3, 5)]  # several buckets, where those are small
WAYS = [
    pytest.param(2, None, id="2 on one host"),
    pytest.param(3, None, id="3 on one host"),
    pytest.param(4, None, id="4 on one host"),
    pytest.param(2, "ab", id="1+1"),
    pytest.param(4, "aabb", id="2+2"),
    pytest.param(3, "aba", id="2+1"),
]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, and several pieces of each, of few bytes; inherited by the members."""
    monkeypatch.setattr(local, "BUCKET", 64 * 1024)
    monkeypatch.setattr(private, "BUCKET", 64 * 1024)
    monkeypatch.setattr(sliced, "PIECE", 8 * 1024)


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def gradients(like: Sequence[Tensor], member: int, update: int) -> list[Tensor]:
    """The same ones in whichever process they are made; strided as their parameters."""
    generator = torch.Generator().manual_seed(1000 * member + update)
    return [
        torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        for p in like
    ]


def weight(member: int, update: int) -> float:
    return float((3 * member + update) % 5)


def mean(like: Sequence[Tensor], count: int, update: int) -> list[Tensor]:
    """As one process would find it, in double precision."""
    every = [gradients(like, member, update) for member in range(count)]
    divisor = sum(weight(member, update) for member in range(count))
    return [sum(g.double() for g in column) / divisor for column in zip(*every, strict=True)]


def difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def updates(
    group: Group, sums: GradientSum, like: Sequence[Tensor], count: int, how: str = "all"
) -> float:
    """Go through updates and return the largest difference from the serial mean."""
    worst = 0.0
    for update in range(count):
        mine = gradients(like, group.index, update)
        sums.begin([weight(group.index, update), float(group.index), 1.0])
        if how == "all":
            sums.put_all(mine)
        else:
            order = list(range(len(mine)))
            random.Random(group.index * 100 + update).shuffle(order)
            for at in order:
                sums.put(at, mine[at])
        found = sums.finish()
        divisor = sum(weight(member, update) for member in range(group.count))
        assert found.row == [divisor, sum(range(group.count)), float(group.count)]
        assert found.finite
        assert found.missing == []
        worst = max(worst, difference(sums.results, mean(like, group.count, update)))
    return worst


@pytest.mark.parametrize(("count", "hosts"), WAYS)
@pytest.mark.parametrize("how", ["all", "any order"])
def test_the_mean_is_that_of_a_serial_sum_with_uneven_weights(
    count: int, hosts: str | None, how: str
) -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        found = []
        for shapes in (TINY, UNEVEN, LARGE):
            like = parameters(shapes)
            sums = collective.gradients(like)
            found.append(updates(group, sums, like, 3, how))
            found.append(bits(sums.results))
        return found

    answers = run(count, body, hosts=hosts)
    assert all(worst < 1e-6 for worst in answers[0][::2]), answers[0]
    assert all(answer[1::2] == answers[0][1::2] for answer in answers), "bits differ"


@pytest.mark.parametrize(("count", "hosts"), [(2, None), (3, "aba"), (2, "ab")])
@pytest.mark.parametrize("many", [False, True])
def test_dtypes_may_differ_and_layouts_are_kept(count: int, hosts: str | None, many: bool) -> None:
    def body(group: Group) -> Any:
        last = torch.channels_last
        size = 300 if many else 3
        like = [
            torch.zeros(8, size, 4, 4).to(memory_format=last),
            torch.zeros(size, 7, dtype=torch.float64),
            torch.zeros(size, 50, dtype=torch.bfloat16),
            torch.zeros(10, size).t(),
            torch.zeros(size, 9, dtype=torch.float16),
            torch.zeros(4, 2 * size)[:, ::2],  # with gaps: its gradient has none
        ]
        sums = group.collective().gradients(like)
        worst: dict[str, float] = {}
        for update in range(3):
            sums.begin([weight(group.index, update)])
            sums.put_all(gradients(like, group.index, update))
            assert sums.finish().finite
            wanted = mean(like, group.count, update)
            for p, r, w in zip(like, sums.results, wanted, strict=True):
                assert r.dtype == p.dtype
                assert r.shape == p.shape
                worst[str(p.dtype)] = max(worst.get(str(p.dtype), 0.0), difference([r], [w]))
        for p, r in zip(like[:-1], sums.results[:-1], strict=True):
            assert r.stride() == p.stride()
        return [worst, bits(sums.results)]

    answers = run(count, body, hosts=hosts)
    allowed = {"torch.float64": 1e-14, "torch.float32": 1e-6}
    allowed |= {"torch.bfloat16": 2**-8, "torch.float16": 2**-11}
    if hosts is not None:  # between hosts halves are rounded on the way
        allowed |= {"torch.bfloat16": 2**-6, "torch.float16": 2**-9}
    assert all(answers[0][0][dtype] <= most for dtype, most in allowed.items()), answers[0][0]
    assert all(answer[1] == answers[0][1] for answer in answers)


@pytest.mark.parametrize(("count", "hosts"), [(1, None), (3, None), (2, "ab"), (3, "aab")])
@pytest.mark.parametrize("shapes", [TINY, UNEVEN])
def test_what_no_member_has_is_missing_and_what_one_lacks_is_zero(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def body(group: Group) -> Any:
        like = parameters(shapes)
        sums = group.collective().gradients(like)
        found = []
        for put_all in (True, False):
            ones: list[Tensor | None] = [torch.ones_like(p) for p in like]
            ones[1] = None  # nobody has it
            ones[2] = ones[2] if group.index == 0 else None
            sums.begin([1.0])
            if put_all:
                sums.put_all(ones)
            for at, one in enumerate(ones):
                if one is not None and not put_all:
                    sums.put(at, one)
            found.append(sums.finish().missing)
            values = [float(r.double().mean()) for r in sums.results]
            assert values[:3] == pytest.approx([1.0, 0.0, 1 / group.count]), values
            sums.begin([1.0])
            sums.put_all([torch.ones_like(p) for p in like])
            found.append(sums.finish().missing)
            sums.begin([1.0])  # nobody has anything
            found.append(sums.finish().missing)
            assert all(not r.any() for r in sums.results)
        return found

    everything = list(range(len(shapes)))
    assert run(count, body, hosts=hosts) == [[[1], [], everything] * 2] * count


@pytest.mark.parametrize(("count", "hosts"), [(1, None), (3, None), (2, "ab"), (4, "aabb")])
@pytest.mark.parametrize("shapes", [TINY, UNEVEN])
def test_one_non_finite_value_on_one_member_is_seen_by_all_and_leaves_nothing(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def body(group: Group) -> Any:
        like = parameters(shapes)
        sums = group.collective().gradients(like)
        found = []
        for bad in (math.nan, math.inf, None, -math.inf, None):
            mine = [torch.ones_like(p) for p in like]
            if bad is not None and group.index == group.count - 1:
                mine[0].view(-1)[-1] = bad
            sums.begin([1.0])
            sums.put_all(mine)
            found.append(sums.finish().finite)
        assert all(bool((r == 1).all()) for r in sums.results)
        return found

    assert run(count, body, hosts=hosts) == [[False, False, True, False, True]] * count


@pytest.mark.parametrize(("count", "hosts"), [(1, None), (2, None), (2, "ab"), (3, "aab")])
@pytest.mark.parametrize("shapes", [TINY, UNEVEN])
def test_divisors_at_the_edge(count: int, hosts: str | None, shapes: list[tuple[int, ...]]) -> None:
    """No weight at all gives zeros; one so small that the mean overflows is not finite."""

    def body(group: Group) -> Any:
        like = [*parameters(shapes), *parameters([(4,)], torch.float16)]
        sums = group.collective().gradients(like)
        found = []
        for share in (0.0, 1e-39, math.inf, math.nan, 0.25):
            sums.begin([share])
            sums.put_all([torch.ones_like(p) for p in like])
            found.append(sums.finish().finite)
            if share == 0:
                assert all(not r.any() for r in sums.results)
        assert all(bool((r == 4).all()) for r in sums.results)
        return found

    assert run(count, body, hosts=hosts) == [[True, False, False, False, True]] * count


@pytest.mark.parametrize(("count", "hosts"), [(1, None), *[p.values for p in WAYS]])
@pytest.mark.parametrize("shapes", [TINY, LARGE])
def test_scaling_clamping_and_the_norm_are_of_the_whole(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def body(group: Group) -> Any:
        like = parameters(shapes)
        sums = group.collective().gradients(like)
        norms = []
        for update in range(2):
            sums.begin([weight(group.index, update + 1)])
            sums.put_all(gradients(like, group.index, update))
            sums.finish()
            whole = torch.cat([r.double().view(-1) for r in sums.results])
            norms.append(sums.norm())
            assert norms[-1] == pytest.approx(float(whole.norm()), rel=1e-6)
            sums.scale_(0.5)
            half = torch.cat([r.double().view(-1) for r in sums.results])
            assert torch.equal(half, (whole.float() * 0.5).double())
            norms.append(sums.norm())  # also a meeting: nobody clamps what another still compares
            sums.clamp_(0.01)
            limited = torch.cat([r.view(-1) for r in sums.results])
            assert torch.equal(limited, half.float().clamp(-0.01, 0.01))
            norms.append(sums.norm())
        return [[norm.hex() for norm in norms], bits(sums.results)]

    answers = run(count, body, hosts=hosts)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("shapes", [TINY, UNEVEN])
@pytest.mark.parametrize(("count", "hosts"), [(2, None), (4, None)])
def test_many_updates_of_members_that_pause_at_random_stay_the_same(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        like = parameters(shapes)
        sums = collective.gradients(like)
        weights = [torch.zeros_like(p) for p in like]
        pause = random.Random(group.index)
        base = [gradients(like, group.index, update) for update in range(3)]
        history = []
        for update in range(200):
            if pause.random() < 0.1:
                time.sleep(pause.random() * 0.004)
            sums.begin([1.0, float(update)])
            for at in reversed(range(len(like))):
                sums.put(at, base[update % 3][at])
            if pause.random() < 0.1:
                time.sleep(pause.random() * 0.004)
            assert sums.finish().row == [group.count, update * group.count]
            if update % 7 == 0:
                sums.scale_(0.5)
            if update % 5 == 0:
                collective.sum([sums.norm()])
            torch._foreach_add_(weights, sums.results)
            if update % 20 == 0:
                history.append(bits(weights))
        return [*history, bits(weights)]

    answers = run(count, body, hosts=hosts)
    assert all(answer == answers[0] for answer in answers)


def test_a_gradient_written_into_its_slot_needs_no_copy() -> None:
    def body(group: Group) -> Any:
        collective: Collective = group.collective()
        for shapes in (TINY, UNEVEN):
            like = parameters(shapes)
            sums = collective.gradients(like)
            for update in range(3):
                sums.begin([1.0])
                for slot in sums.slots:
                    slot.fill_(group.index + update)
                sums.put_all(sums.slots)
                sums.finish()
                assert all(bool((r == 0.5 + update).all()) for r in sums.results)
                collective.barrier()  # before the first member writes over what the other compares
        return True

    assert run(2, body) == [True, True]


def test_a_gradient_put_twice_and_calls_out_of_order_are_refused() -> None:
    def body(group: Group) -> Any:
        sums = group.collective().gradients(parameters(TINY))
        with pytest.raises(AssertionError, match="finish before begin"):
            sums.finish()
        with pytest.raises(AssertionError, match="put before begin"):
            sums.put(0, torch.ones(3))
        with pytest.raises(AssertionError, match="put before begin"):
            sums.put_all([None] * 3)
        with pytest.raises(AssertionError, match="a row of 17 values"):
            sums.begin([1.0] * 17)
        sums.begin([1.0])
        sums.put(0, torch.ones(3))
        with pytest.raises(AssertionError, match="the gradient of parameter 0 came twice"):
            sums.put(0, torch.ones(3))
        with pytest.raises(AssertionError, match="the last update's gradients are not finished"):
            sums.begin([1.0])
        return True

    assert run(1, body) == [True]
