"""Gradient sums: the mean is right and the same bits on every member, for every kind of sum."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm import Group
from echelon.comm.interface import GradientSum

from .processes import bits, run
from .sums import (
    EVERY_WAY,
    LARGE,
    TINY,
    UNEVEN,
    among,
    difference,
    few_or_many,
    gradients,
    mean,
    meet,
    ones,
    parameters,
    run_sums,
    weight,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_buckets")]


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


@among(*EVERY_WAY)
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


@among((2, None), (3, "aba"), (2, "ab"))
@pytest.mark.parametrize("size", [3, 300])
def test_dtypes_may_differ_and_layouts_are_kept(count: int, hosts: str | None, size: int) -> None:
    like = [
        torch.zeros(8, size, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(size, 7, dtype=torch.float64),
        torch.zeros(size, 50, dtype=torch.bfloat16),
        torch.zeros(10, size).t(),
        torch.zeros(size, 9, dtype=torch.float16),
        torch.zeros(4, 2 * size)[:, ::2],  # with gaps: its gradient has none
    ]

    def part(group: Group, like: list[Tensor], sums: GradientSum) -> Any:
        worst: dict[str, float] = {}
        for update in range(3):
            mine = gradients(like, group.index, update)
            assert meet(sums, weight(group.index, update), mine).finite
            wanted = mean(like, group.count, update)
            for p, r, w in zip(like, sums.results, wanted, strict=True):
                assert (r.dtype, r.shape) == (p.dtype, p.shape)
                worst[str(p.dtype)] = max(worst.get(str(p.dtype), 0.0), difference([r], [w]))
        for p, r in zip(like[:-1], sums.results[:-1], strict=True):
            assert r.stride() == p.stride()
        return [worst, bits(sums.results)]

    answers = run_sums(count, hosts, like, part)
    allowed = {"torch.float64": 1e-14, "torch.float32": 1e-6}
    allowed |= {"torch.bfloat16": 2**-8, "torch.float16": 2**-11}
    if hosts is not None:  # between hosts halves are rounded on the way
        allowed |= {"torch.bfloat16": 2**-6, "torch.float16": 2**-9}
    assert all(answers[0][0][dtype] <= most for dtype, most in allowed.items()), answers[0][0]
    assert all(answer[1] == answers[0][1] for answer in answers)


@among((1, None), (3, None), (2, "ab"), (3, "aab"))
@few_or_many
def test_what_no_member_has_is_missing_and_what_one_lacks_is_zero(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def part(group: Group, like: list[Tensor], sums: GradientSum) -> Any:
        found = []
        for put_all in (True, False):
            mine: list[Tensor | None] = [*ones(like)]
            mine[1] = None  # nobody has it
            mine[2] = mine[2] if group.index == 0 else None
            sums.begin([1.0])
            if put_all:
                sums.put_all(mine)
            for at, one in enumerate(mine):
                if one is not None and not put_all:
                    sums.put(at, one)
            found.append(sums.finish().missing)
            values = [float(r.double().mean()) for r in sums.results]
            assert values[:3] == pytest.approx([1.0, 0.0, 1 / group.count]), values
            found.append(meet(sums, 1.0, ones(like)).missing)
            sums.begin([1.0])  # nobody has anything
            found.append(sums.finish().missing)
            assert all(not r.any() for r in sums.results)
        return found

    everything = list(range(len(shapes)))
    wanted = [[1], [], everything] * 2
    assert run_sums(count, hosts, parameters(shapes), part) == [wanted] * count


@among((1, None), (3, None), (2, "ab"), (4, "aabb"))
@few_or_many
def test_one_non_finite_value_on_one_member_is_seen_by_all_and_leaves_nothing(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def part(group: Group, like: list[Tensor], sums: GradientSum) -> Any:
        found = []
        for bad in (math.nan, math.inf, None, -math.inf, None):
            mine = ones(like)
            if bad is not None and group.index == group.count - 1:
                mine[0].view(-1)[-1] = bad
            found.append(meet(sums, 1.0, mine).finite)
        assert all(bool((r == 1).all()) for r in sums.results)
        return found

    wanted = [False, False, True, False, True]
    assert run_sums(count, hosts, parameters(shapes), part) == [wanted] * count


@among((1, None), (2, None), (2, "ab"), (3, "aab"))
@few_or_many
def test_divisors_at_the_edge(count: int, hosts: str | None, shapes: list[tuple[int, ...]]) -> None:
    """No weight at all gives zeros; one so small that the mean overflows is not finite."""

    def part(_group: Group, like: list[Tensor], sums: GradientSum) -> Any:
        found = []
        for share in (0.0, 1e-39, math.inf, math.nan, 0.25):
            found.append(meet(sums, share, ones(like)).finite)
            if share == 0:
                assert all(not r.any() for r in sums.results)
        assert all(bool((r == 4).all()) for r in sums.results)
        return found

    like = [*parameters(shapes), *parameters([(4,)], torch.float16)]
    assert run_sums(count, hosts, like, part) == [[True, False, False, False, True]] * count


@among((1, None), *EVERY_WAY)
@pytest.mark.parametrize("shapes", [TINY, LARGE])
def test_scaling_clamping_and_the_norm_are_of_the_whole(
    count: int, hosts: str | None, shapes: list[tuple[int, ...]]
) -> None:
    def part(group: Group, like: list[Tensor], sums: GradientSum) -> Any:
        norms = []
        for update in range(2):
            meet(sums, weight(group.index, update + 1), gradients(like, group.index, update))
            whole = joint(sums)
            norms.append(sums.norm())
            assert norms[-1] == pytest.approx(float(whole.norm()), rel=1e-6)
            sums.scale_(0.5)
            half = joint(sums)
            assert torch.equal(half, whole * 0.5)
            norms.append(sums.norm())  # also a meeting: nobody clamps what another still compares
            sums.clamp_(0.01)
            assert torch.equal(joint(sums), half.float().clamp(-0.01, 0.01).double())
            norms.append(sums.norm())
        return [[norm.hex() for norm in norms], bits(sums.results)]

    answers = run_sums(count, hosts, parameters(shapes), part)
    assert all(answer == answers[0] for answer in answers)


def joint(sums: GradientSum) -> Tensor:
    """A copy of all results, one behind the other."""
    return torch.cat([r.double().view(-1) for r in sums.results])
