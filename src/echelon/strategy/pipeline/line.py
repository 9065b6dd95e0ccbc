"""The line along which stages pass tensors: torch's point-to-point messages.

    first tensor of a form:   form (dtype, shape, order of dimensions in memory) ─▶ tensor
    each one after it:        tensor

Both ends know the form of all tensors from equal micro-batches after the first, so the receiver can
allocate memory and begin to receive before the tensor is sent. A tensor has the same memory layout
at the receiver as at the sender, because kernels choose their algorithm by it.

Messages use torch's gloo group; tensors on a GPU go through the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import PeerError, TaskError

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
_GLOO = re.compile(r"^\[\S*\] ")  # gloo's messages begin with a line of its source


class Line:
    """This member's connections to the others along the pipeline."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, row: Tensor, member: int, tag: int) -> None:
        """Send without waiting for the receiver. `row` must not change until `settle`."""
        work = self._try(lambda: self._group.send([row], member, tag), member)
        self._sent.append((work, row))

    def begin_receive(self, row: Tensor, member: int, tag: int) -> Callable[[], None]:
        """Begin to receive into `row`; return a function that waits for the tensor."""
        work = self._try(lambda: self._group.recv([row], member, tag), member)
        return lambda: self._try(work.wait, member)

    def receive(self, row: Tensor, member: int, tag: int) -> Tensor:
        self.begin_receive(row, member, tag)()
        return row

    def settle(self) -> None:
        """Wait until all sent tensors are transmitted."""
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


class Form(NamedTuple):
    """A tensor's memory layout: the sizes of its dimensions, outermost first, and their order."""

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
        """Return the values of `tensor` in the order of this form, contiguous, on the host."""
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


def can_pass(y: Any) -> TypeGuard[Tensor]:
    """Return whether `y` is a tensor whose form can be described and sent."""
    return isinstance(y, Tensor) and y.dtype in _DTYPES and y.ndim <= MOST_DIMS


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
