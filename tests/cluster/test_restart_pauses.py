"""The coordinator is restarted with growing pauses, and not for ever."""

from __future__ import annotations

import pytest

from echelon.cluster.services import MOST_STARTS, WINDOW_SECONDS, pause_before
from echelon.core.errors import TrainingError


def test_the_first_restart_is_immediate_and_further_ones_wait_longer() -> None:
    pauses = [pause_before(starts) for starts in range(1, MOST_STARTS)]
    assert pauses[:6] == [0.0, 0.0, 0.05, 0.1, 0.2, 0.4]
    assert pauses == sorted(pauses)
    assert max(pauses) == 2.0


def test_failing_for_half_a_minute_is_too_much() -> None:
    assert 20 < sum(map(pause_before, range(1, MOST_STARTS))) < WINDOW_SECONDS
    with pytest.raises(TrainingError, match="the coordinator ended 19 times in 60 s"):
        pause_before(MOST_STARTS)
