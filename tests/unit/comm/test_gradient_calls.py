"""The calls of a gradient sum: at any moment, without copies, and in order."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from echelon.comm import Collective, Group

from .processes import bits, run
from .sums import TINY, UNEVEN, among, few_or_many, gradients, parameters

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_buckets")]


@few_or_many
@among((2, None), (4, None))
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
