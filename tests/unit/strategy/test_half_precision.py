"""The trial of half precision in a child process."""

from __future__ import annotations

import pytest
import torch

from echelon.strategy import half_precision as half


def test_a_trial_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_child: int) -> int | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(half, "_awaited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        half._survives(torch.bfloat16)


def test_a_trial_that_takes_too_long_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "_DEADLINE", 0.0)
    assert not half._survives(torch.bfloat16)
