"""Shares of a batch follow speed if samples take time, and stay equal if they do not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import mean

import pytest

from echelon.server.accounting import FIRST, Speeds

BATCH = 32


def shares(seconds: Callable[[int, int, int], float], members: int, pushes: int) -> list[list[int]]:
    """What each member was given, push by push, if its n-th one of so many samples takes so long:
    `seconds(member, samples, n)`."""
    speeds, chance = Speeds(), Random(7)
    given: list[list[int]] = [[] for _ in range(members)]
    for number in range(pushes):
        for member in range(members):
            size = int(speeds.share(member, range(members), BATCH))
            given[member].append(size)
            noise = chance.lognormvariate(0.0, 0.3)
            speeds.note(member, size, noise * seconds(member, size, number))
    return given


def test_trainers_that_are_nearly_as_fast_have_whole_batches() -> None:
    speeds = Speeds()
    for _ in range(FIRST + 1):
        speeds.note(0, 100, 1.0)
        speeds.note(1, 100, 1.15)
    assert [speeds.share(member, (0, 1), 64) for member in (0, 1)] == [64.0, 64.0]


@pytest.mark.parametrize("overhead", [0, 8, 32, 1000])
def test_equal_trainers_keep_equal_parts_whatever_a_step_costs(overhead: int) -> None:
    """By chance one has fewer samples for a while; that does not make it slow."""
    given = shares(lambda _, samples, __: overhead + samples, members=2, pushes=3000)
    for at in range(0, 3000, 500):
        parts = [mean(sizes[at : at + 500]) for sizes in given]
        assert parts == pytest.approx([BATCH, BATCH], rel=0.2)


@pytest.mark.parametrize("overhead", [0, 8])
def test_a_slow_trainer_pushes_as_often_as_others(overhead: int) -> None:
    def seconds(member: int, samples: int, _: int = 0) -> float:
        return (4 if member == 0 else 1) * (overhead + samples)

    given = shares(seconds, members=4, pushes=600)
    paces = [seconds(member, round(mean(sizes[300:]))) for member, sizes in enumerate(given)]
    assert max(paces) / min(paces) < 1.35
    assert mean(mean(sizes[300:]) for sizes in given) == pytest.approx(BATCH, rel=0.1)


def test_who_is_slow_for_a_while_gets_its_part_back() -> None:
    given = shares(
        lambda member, samples, n: samples * (6 if member == 0 and 200 <= n < 400 else 1),
        members=2,
        pushes=800,
    )
    assert mean(given[0][300:400]) < 0.5 * BATCH
    assert mean(given[0][600:]) == pytest.approx(BATCH, rel=0.2)
