"""Consecutive layers, and one micro-batch at a time through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from echelon.core.errors import TaskError
from echelon.strategy.pipeline.line import MOST_DIMS, can_pass


class Stage:
    """Keeps what backward needs, per micro-batch, from forward on.

    `start` is its first layer's number in the chain; `draw(layer, micro)` prepares random numbers.
    """

    def __init__(
        self,
        index: int,
        start: int,
        layers: Sequence[nn.Module],
        autocast: Callable[[], AbstractContextManager[object]],
        draw: Callable[[int, int], None],
    ) -> None:
        self.index = index
        self._layers = tuple(enumerate(layers, start))
        self._autocast, self._draw = autocast, draw
        self.trained = [p for p in nn.ModuleList(layers).parameters() if p.requires_grad]
        self._in_one = not all(_can_be_cut(m) for layer in layers for m in layer.modules())
        self._inputs: dict[int, Any] = {}
        self._outputs: dict[int, Tensor] = {}
        self._left: dict[int, Callable[[], None]] = {}

    def enter(self, micro: int) -> None:
        """What is drawn from now on belongs to what comes before the first layer."""
        self._draw(-1, micro)

    def forward(self, micro: int, x: Any, *, passed: bool, learning: bool) -> Any:
        """`passed`: `x` came from the stage before, which wants to know its gradient."""
        if learning:
            if passed and x.is_floating_point():
                x = x.requires_grad_()
            self._inputs[micro] = x
            if passed:
                x = x.clone()  # layers may write over what they get, but not over a leaf
        with self._autocast():
            for number, layer in self._layers:
                if learning:
                    self._draw(number, micro)
                x = layer(x)
        return x

    def keep(self, micro: int, output: Tensor, *, cut: bool) -> Tensor:
        """What backward will begin with: what was passed on, or the loss."""
        if cut and output._is_view():
            output = output.clone()  # its graph has to be let go of, which a view cannot do
        self._outputs[micro] = output
        return output

    def backward(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients; returns that of the input, if it has any."""
        x, y = self._inputs.pop(micro), self._outputs.pop(micro)
        _backward(y, gradient)
        return _gradient_of(x)

    def backward_input(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input alone; those of the weights are left for later."""
        if self._in_one:
            self._left[micro] = _nothing
            return self.backward(micro, gradient)
        x, y = self._inputs.pop(micro), self._outputs.pop(micro)
        if not (isinstance(x, Tensor) and x.requires_grad and y.requires_grad):
            self._left[micro] = lambda: _backward(y, gradient)
            return None
        start = [torch.ones_like(y) if gradient is None else gradient]
        _, groups = stage_backward_input([y], start, [x], iter(self.trained))
        self._left[micro] = lambda: _weights(self.trained, groups)
        return _gradient_of(x)

    def backward_weights(self, micro: int) -> None:
        self._left.pop(micro)()

    def clear(self) -> None:
        """Drop what a broken-off run has left behind."""
        self._inputs.clear()
        self._outputs.clear()
        self._left.clear()


def one_tensor(y: Any, layer: str) -> Tensor:
    if can_pass(y):
        return y
    what = f"a {type(y).__name__}"
    if isinstance(y, Tensor):
        what += f" of {y.ndim} dimensions and {str(y.dtype).removeprefix('torch.')}"
    raise TaskError(
        f"layer {layer!r} gives {what} where the pipeline is cut: only one tensor of real or whole "
        f"numbers, in up to {MOST_DIMS} dimensions, can pass between stages"
    )


def _can_be_cut(module: nn.Module) -> bool:
    """Whether backward may go through it twice, for the input and for the weights.

    torch's group norm crashes if only its weights are asked for and channels lie last in memory.
    What recomputes would do so twice.
    """
    return not isinstance(module, nn.GroupNorm) and "forward" not in module.__dict__


def _nothing() -> None:
    """The weights have their gradients already."""


def _backward(y: Tensor, gradient: Tensor | None) -> None:
    if y.requires_grad:  # a stage of frozen layers has nothing to learn
        y.backward(gradient)


def _weights(trained: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    stage_backward_weight(iter(trained), groups)


def _gradient_of(x: Any) -> Tensor | None:
    return x.grad if isinstance(x, Tensor) else None
