"""Gradients are divided, checked, measured and clipped as whole lists."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from echelon.optim import (
    clip_norm_,
    clip_value_,
    finish_,
    first_non_finite,
    global_norm,
    layer_norms,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def lists(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (5,), (), (2, 0)]
    return [torch.randn(shape, generator=generator).to(t) for t in dtypes for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 32.0, 3.0, 0.3, 65536.0 * 7])
def test_finishing_divides_everything(dtype: torch.dtype, divisor: float) -> None:
    grads = lists(dtype)
    expected = [grad.double() / divisor for grad in grads]
    assert finish_(grads, divisor) is True
    rough = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-15}
    for grad, value in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), value, rtol=rough[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_single_value_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    grads = lists(dtype)
    grads[1][4] = bad
    assert finish_(grads, 2.0) is False
    assert finish_(lists(dtype), 2.0) is True, "the flag was not taken down"


def test_mixed_dtypes_are_finished_together() -> None:
    grads = lists(*DTYPES)
    expected = [(grad.double() / 4).to(grad.dtype) for grad in grads]
    assert finish_(grads, 4.0)
    assert all(torch.equal(grad, value) for grad, value in zip(grads, expected, strict=True))
    grads[5][0] = math.inf
    assert not finish_(grads, 4.0)


def test_an_overflow_by_the_division_itself_is_found() -> None:
    assert not finish_([torch.full((3,), 1e38)], 1e-3)
    assert not finish_([torch.full((3,), 1e308, dtype=torch.float64)], 1e-3)


def test_doubles_keep_their_range_and_precision() -> None:
    grads = [torch.tensor([1e300, 1.0], dtype=torch.float64)]
    assert finish_(grads, 3.0)
    assert grads[0].tolist() == [1e300 / 3, 1 / 3]


def test_nothing_to_finish_is_finite() -> None:
    assert finish_([], 1.0)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.inf, math.nan])
def test_a_divisor_without_sense_is_refused(divisor: float) -> None:
    with pytest.raises(AssertionError, match="cannot be divided"):
        finish_([torch.ones(1)], divisor)


def test_threads_do_not_see_each_others_verdict() -> None:
    verdicts: dict[bool, list[bool]] = {True: [], False: []}

    def run(good: bool) -> None:
        values = torch.full((300_000,), 1.0 if good else math.nan)
        for _ in range(100):
            verdicts[good].append(finish_([values], 1.0))

    threads = [threading.Thread(target=run, args=(good,)) for good in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(verdicts[True])
    assert not any(verdicts[False])


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64, torch.float32]], ids=len)
def test_the_global_norm_is_that_of_one_long_vector(dtypes: list[torch.dtype]) -> None:
    grads = lists(*dtypes)
    flat = torch.cat([grad.double().flatten() for grad in grads])
    torch.testing.assert_close(global_norm(grads).double(), flat.norm(), rtol=1e-6, atol=0)


def test_the_norm_of_half_precision_is_added_up_in_single() -> None:
    grads = [torch.full((70_000,), 0.5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)]
    assert float(global_norm(grads)) == pytest.approx(math.sqrt(70_000 / 4 + 3), rel=1e-6)
    assert float(global_norm([torch.full((4,), 300.0, dtype=torch.float16)])) == 600.0


def test_the_norm_of_a_large_gradient_keeps_its_digits() -> None:
    grads = [torch.full((2_000_000,), 0.1), torch.full((2000, 1000), 0.1).t()]
    assert float(global_norm(grads)) == pytest.approx(200.0, rel=2e-5)


def test_the_norm_of_nothing_is_zero() -> None:
    assert float(global_norm([])) == 0.0


def test_clipping_by_norm_scales_as_torch_does() -> None:
    grads = lists(torch.float32)
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.testing.assert_close(clip_norm_(grads, 0.5), expected)
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    assert float(global_norm(grads)) == pytest.approx(0.5, rel=1e-5)


def test_clipping_leaves_small_gradients_alone() -> None:
    grads = lists(torch.float32, torch.float64)
    before = [grad.clone() for grad in grads]
    norm = clip_norm_(grads, 1e6)
    assert float(norm) == pytest.approx(float(global_norm(before)))
    assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))


def test_clipping_scales_every_dtype_by_the_same() -> None:
    grads = lists(torch.float32, torch.float64)
    before = [grad.clone() for grad in grads]
    norm = float(clip_norm_(grads, 0.1))
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old * (0.1 / (norm + 1e-6)))


def test_clipping_elsewhere_does_not_wait_for_the_device() -> None:
    grads = [torch.ones(3, device="meta"), torch.ones(2, device="meta", dtype=torch.float64)]
    assert clip_norm_(grads, 0.1).device.type == "meta"


def test_clipping_by_value_clamps_both_sides() -> None:
    grads = [torch.tensor([-3.0, 0.1, 3.0]), torch.tensor([9.0], dtype=torch.float64)]
    clip_value_(grads, 0.5)
    assert grads[0].tolist() == pytest.approx([-0.5, 0.1, 0.5])
    assert grads[1].tolist() == [0.5]


def test_the_first_layer_that_is_not_finite_is_named() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    assert first_non_finite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_non_finite([("a", good)]) is None


def test_norms_by_layer_keep_names_and_order() -> None:
    named = [
        ("z", torch.tensor([3.0, 4.0])),
        ("a", torch.tensor([5.0], dtype=torch.float64)),
        ("m", torch.full((4,), 0.5, dtype=torch.bfloat16)),
    ]
    found = layer_norms(named)
    assert list(found) == ["z", "a", "m"]
    assert list(found.values()) == pytest.approx([5.0, 5.0, 1.0])
    assert layer_norms([]) == {}
