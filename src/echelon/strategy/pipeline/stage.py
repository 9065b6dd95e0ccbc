"""One stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from echelon.core.errors import PeerError, TaskError

# --- stage ---
# Consecutive layers, and one micro-batch at a time through them.


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


# --- draws ---
# Random numbers that belong to a layer and a micro-batch, not to the member that computes them.
#
# Dropout draws other numbers in every layer, step and replica, but the same ones however the
# layers are spread over the members. So a run that is resumed goes on as it would have, cut as it
# may be.


class Draws:
    """Lends the generator that layers draw from."""

    def __init__(self, device: torch.device) -> None:
        # torch.manual_seed would do for all devices, but notes a stack trace at every call
        cuda = device.type == "cuda"
        generators = torch.cuda.default_generators
        self._generator = generators[device.index or 0] if cuda else torch.default_generator
        self._start = 0

    @contextmanager
    def during(self, *numbers: int) -> Iterator[None]:
        """For what these numbers stand for, such as version and replica; nothing is used up."""
        before = self._generator.get_state()
        self._start = _mixed(self._generator.initial_seed(), *numbers)
        try:
            yield
        finally:
            self._generator.set_state(before)

    def begin(self, layer: int, micro: int) -> None:
        """What is drawn from now on belongs to this layer."""
        self._generator.manual_seed(_mixed(self._start, layer, micro))


def _mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ number) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63
    return seed


# --- line ---
# The line along which stages pass tensors on: torch's point-to-point messages.
#
# The first tensor of a form is announced by a message of its own, with shape, dtype and order of
# the dimensions in memory. Both ends then know the form of whatever comes from alike micro-
# batches, so that the receiver makes room, and is ready to receive, before the tensor is sent. A
# tensor lies in memory at the receiver as it did at the sender: kernels choose their way by that.
#
# Through torch's gloo group; what is on a GPU goes by way of the host's memory.

MOST_DIMS = 12
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


_GLOO = re.compile(r"^\[\S*\] ")  # the line of its own source that it begins with


def can_pass(y: Any) -> TypeGuard[Tensor]:
    """Whether this can be told of and sent."""
    return isinstance(y, Tensor) and y.dtype in _DTYPES and y.ndim <= MOST_DIMS


class Form(NamedTuple):
    """How a tensor lies in memory: its dimensions, the outermost first, and where they belong."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda at: (-strides[at], at)))
        return cls(tensor.dtype, tuple(tensor.shape[at] for at in order), order)

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point

    def laid(self, tensor: Tensor) -> Tensor:
        """The values of `tensor` in a row, in the order of this form, on the host."""
        return tensor.detach().to("cpu", self.dtype).permute(self.order).contiguous()

    def room(self) -> Tensor:
        return torch.empty(self.sizes, dtype=self.dtype)

    def read(self, row: Tensor, device: torch.device) -> Tensor:
        places = [self.order.index(at) for at in range(len(self.order))]
        return row.permute(places).to(device)

    def described(self) -> Tensor:
        rest = [0] * (MOST_DIMS - len(self.sizes))
        numbers = [_DTYPES.index(self.dtype), len(self.sizes)]
        return torch.tensor([*numbers, *self.sizes, *rest, *self.order, *rest])

    @classmethod
    def understood(cls, numbers: Sequence[int]) -> Form:
        kind, dims = numbers[:2]
        sizes, order = numbers[2 : 2 + dims], numbers[2 + MOST_DIMS : 2 + MOST_DIMS + dims]
        return cls(_DTYPES[kind], tuple(sizes), tuple(order))


class Line:
    """This member's connections to the others along the pipeline."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, row: Tensor, member: int, tag: int) -> None:
        """Does not wait for the receiver; `row` must stay as it is until `settle`."""
        work = self._try(lambda: self._group.send([row], member, tag), member)
        self._sent.append((work, row))

    def begin_receive(self, row: Tensor, member: int, tag: int) -> Callable[[], None]:
        """Calling what this gives back waits for the tensor."""
        work = self._try(lambda: self._group.recv([row], member, tag), member)
        return lambda: self._try(work.wait, member)

    def receive(self, row: Tensor, member: int, tag: int) -> Tensor:
        self.begin_receive(row, member, tag)()
        return row

    def settle(self) -> None:
        """Until everything sent is on its way for good."""
        for work, _ in self._sent:
            self._try(work.wait, None)
        self._sent.clear()

    def _try(self, call: Callable[[], Any], member: int | None) -> Any:
        try:
            return call()
        except RuntimeError as error:
            who = "a neighbour" if member is None else f"the member at place {member}"
            said = _GLOO.sub("", str(error)).partition(". ")[0].partition("\n")[0]
            raise PeerError(f"{who} of the pipeline is gone or does not answer ({said})") from None
