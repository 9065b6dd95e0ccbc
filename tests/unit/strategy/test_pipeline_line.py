"""Tensors that pass between stages arrive with the same values and memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.core.errors import TaskError
from echelon.strategy.pipeline.line import Form, one_tensor


def test_only_one_tensor_can_pass_between_stages() -> None:
    assert one_tensor(torch.ones(1), "3").numel() == 1
    with pytest.raises(TaskError, match="layer '3' gives a tuple where the pipeline is cut"):
        one_tensor((torch.ones(1),), "3")
    with pytest.raises(TaskError, match="Tensor of 1 dimensions and complex64 where"):
        one_tensor(torch.ones(1, dtype=torch.complex64), "3")
    with pytest.raises(TaskError, match=r"Tensor of 13 dimensions and .* in up to 12 dimensions"):
        one_tensor(torch.ones([1] * 13), "3")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(6, dtype=torch.uint8).view(2, 3),
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(0, 3),
        torch.tensor(1.5),
        torch.randn(1, 3).expand(4, 3),
    ],
)
def test_a_tensor_arrives_as_it_was_sent(tensor: Tensor) -> None:
    form = Form.of(tensor)
    assert Form.understood(form.described().tolist()) == form
    row = form.room()
    row.copy_(form.laid(tensor))
    arrived = form.read(row, torch.device("cpu"))
    assert torch.equal(arrived, tensor)
    dense = tensor.clone()  # keeps the order of dimensions, but not overlaps
    assert arrived.stride() == dense.stride() or tensor.stride()[0] == 0
    assert form.differentiable == tensor.is_floating_point()
