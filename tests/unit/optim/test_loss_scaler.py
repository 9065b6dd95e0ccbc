"""The fp16 loss scale grows while all is well and backs off on overflow."""

from __future__ import annotations

import pytest

from echelon.core.errors import CheckpointError
from echelon.optim import LossScaler


def test_it_doubles_after_two_thousand_good_steps_in_a_row() -> None:
    scaler = LossScaler("fp16")
    assert scaler.scale == 65536.0
    for _ in range(1999):
        scaler.update(finite=True)
    scaler.update(finite=False)
    assert scaler.scale == 32768.0
    for _ in range(1999):
        scaler.update(finite=True)
    assert scaler.scale == 32768.0
    scaler.update(finite=True)
    assert scaler.scale == 65536.0


def test_it_does_not_grow_without_end() -> None:
    scaler = LossScaler("fp16")
    for _ in range(2000 * 12):
        scaler.update(finite=True)
    assert scaler.scale == 2.0**24


def test_overflow_at_the_smallest_scale_exhausts_it() -> None:
    scaler = LossScaler("fp16")
    for _ in range(16):
        scaler.update(finite=False)
    assert (scaler.scale, scaler.exhausted) == (1.0, False)
    scaler.update(finite=False)
    assert (scaler.scale, scaler.exhausted) == (1.0, True)
    scaler.update(finite=True)
    assert not scaler.exhausted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_are_not_scaled(precision: str) -> None:
    scaler = LossScaler(precision)
    scaler.update(finite=False)
    assert (scaler.enabled, scaler.scale, scaler.exhausted) == (False, 1.0, False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_it_goes_on_where_it_was_saved() -> None:
    first, second = LossScaler("fp16"), LossScaler("fp16")
    first.update(finite=False)
    for _ in range(1500):
        first.update(finite=True)
    second.load_state_dict(first.state_dict())
    for _ in range(500):
        second.update(finite=True)
    assert second.scale == 65536.0


def test_the_state_of_another_precision_is_refused() -> None:
    with pytest.raises(CheckpointError, match="only runs in fp16"):
        LossScaler("bf16").load_state_dict(LossScaler("fp16").state_dict())
    with pytest.raises(CheckpointError, match="only runs in fp16"):
        LossScaler("fp16").load_state_dict({})
