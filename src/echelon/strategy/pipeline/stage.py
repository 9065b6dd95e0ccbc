"""A stage: consecutive layers, one micro-batch at a time through them, and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Stage:
    """Consecutive layers, and what backward needs of each micro-batch that went forward.

    `start` is the first layer's number in the chain; `draw(layer, micro)` prepares random numbers.
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
        """Prepare random numbers for what happens before the first layer."""
        self._draw(-1, micro)

    def forward(self, micro: int, x: Any, *, passed: bool, learning: bool) -> Any:
        """Return the output. `passed`: the previous stage sent `x` and needs its gradient."""
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
        """Keep what backward begins with, the output or the loss; return it."""
        if cut and output._is_view():
            output = output.clone()  # its graph has to be detached, which a view does not allow
        self._outputs[micro] = output
        return output

    def backward(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """Compute all gradients; return that of the input, if it has one."""
        x, y = self._inputs.pop(micro), self._outputs.pop(micro)
        _backward(y, gradient)
        return _gradient_of(x)

    def backward_input(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input; leave those of the weights to `backward_weights`."""
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
        """Drop what an interrupted run has left behind."""
        self._inputs.clear()
        self._outputs.clear()
        self._left.clear()


def _can_be_cut(module: nn.Module) -> bool:
    """Return whether backward may pass a module twice, for the input and for the weights.

    torch's group norm crashes if only the gradients of its weights are computed and channels are
    last in memory. A module that recomputes its activations would do so twice.
    """
    return not isinstance(module, nn.GroupNorm) and "forward" not in module.__dict__


def _nothing() -> None:
    """Do nothing: the weights have their gradients already."""


def _backward(y: Tensor, gradient: Tensor | None) -> None:
    if y.requires_grad:  # a stage of frozen layers has nothing to learn
        y.backward(gradient)


def _weights(trained: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    stage_backward_weight(iter(trained), groups)


def _gradient_of(x: Any) -> Tensor | None:
    return x.grad if isinstance(x, Tensor) else None


# Random numbers belong to a layer and a micro-batch, not to the member that computes them
#
# Dropout draws different numbers in every layer, step and replica, but the same ones however the
# layers are divided among the members. So a resumed run continues as before, however it is cut.


class Draws:
    """Seeds the generator from which layers draw, before each layer of each micro-batch."""

    def __init__(self, device: torch.device) -> None:
        # torch.manual_seed works for all devices, but records a stack trace at every call.
        cuda = device.type == "cuda"
        generators = torch.cuda.default_generators
        self._generator = generators[device.index or 0] if cuda else torch.default_generator
        self._start = 0

    @contextmanager
    def during(self, *numbers: int) -> Iterator[None]:
        """Draw for these numbers, such as version and replica, while inside. The generator's state
        is restored afterwards."""
        before = self._generator.get_state()
        self._start = _mixed(self._generator.initial_seed(), *numbers)
        try:
            yield
        finally:
            self._generator.set_state(before)

    def begin(self, layer: int, micro: int) -> None:
        """Seed the generator for a layer and a micro-batch."""
        self._generator.manual_seed(_mixed(self._start, layer, micro))


def _mixed(*numbers: int) -> int:
    """Mix several numbers into one seed."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ number) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63
    return seed
