"""The merit of a trainer's gradients: what they do to held-out samples of all trainers.

held out of trainer 0 ─┐                  ┌─ cosine with the gradient of part 0 ─┐
held out of trainer 1 ─┼─▶ every trainer ─┼─ … of part 1                         ├─▶ median
held out of trainer 2 ─┘                  └─ … of part 2 ────────────────────────┘

A trainer whose samples are spoilt, the held-out ones included, is measured by the parts of the
others, and can spoil no more than its own part. The gate decides what becomes of a push with little
merit (server/accounting.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import to_device

_MOST = 48
"""Numbers that describe the columns of a part: enough for a dozen columns."""
LossOf = Callable[[Batch], tuple[Tensor, float]]


class Judge:
    """Measures the merit of this trainer's gradients by held-out `parts`, at every `every`-th push.

    `loss_of`: returns (loss sum, weight) of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        parameters: Sequence[Tensor],
        parts: Sequence[Batch],
        every: int = 1,
    ) -> None:
        self._model, self._loss_of = model, loss_of
        self._parameters = list(parameters)
        self._parts = list(parts)
        self._every = every
        self._seen = 0

    def merit(self, grads: Sequence[Tensor]) -> float:
        """Return the cosine of these gradients and those of the held-out samples: the median over
        all parts, or NaN for a push that is not measured.

        Above 0 the loss of the held-out samples falls with an update by `grads`, below it rises.
        """
        self._seen += 1
        if (self._seen - 1) % self._every:
            return math.nan
        training = self._model.training
        self._model.eval()  # batch statistics stay as they are
        try:
            return median(self._agreement(part, grads) for part in self._parts)
        finally:
            self._model.train(training)

    def _agreement(self, part: Batch, grads: Sequence[Tensor]) -> float:
        loss_sum, _ = self._loss_of(part)
        wanted = torch.autograd.grad(loss_sum, self._parameters, allow_unused=True)
        pairs = [(w, g) for w, g in zip(wanted, grads, strict=True) if w is not None]
        product = sum(float((w * g.to(w.device)).sum()) for w, g in pairs)
        lengths = _length([w for w, _ in pairs]) * _length(list(grads))
        return product / lengths if lengths > 0 else 0.0


def held_out(
    source: BatchSource, peers: Collective, samples: int, device: torch.device
) -> list[Batch]:
    """Return about so many held-out samples, a part from each trainer. All trainers call it
    together.

    If parts differ in shape they cannot be exchanged, and each trainer gets its own alone.
    """
    each = max(1, min(samples, len(source)) // peers.count)
    rows = torch.linspace(0, len(source) - 1, each * peers.count).long()[peers.index :: peers.count]
    mine = source.gather(rows)
    columns = {name: column for name, column in mine.items() if isinstance(column, Tensor)}
    if peers.count > 1 and _all_alike(peers, mine, columns):
        parts = [_from(peers, source_index, columns) for source_index in range(peers.count)]
    else:
        parts = [mine]
    return [to_device(part, device) for part in parts]


def _all_alike(peers: Collective, mine: Batch, columns: dict[str, Tensor]) -> bool:
    """Return whether all parts have the same columns, in shape and item size.

    All trainers get the same answer.
    """
    tensors = [columns[name] for name in sorted(columns)]
    shape = [float(x) for held in tensors for x in (held.itemsize, held.ndim, *held.shape)]
    plain = len(columns) == len(mine) and len(shape) < _MOST
    shape = (shape + [0.0] * _MOST)[:_MOST]
    sums = peers.sum(shape)
    same = plain and all(total == peers.count * x for total, x in zip(sums, shape, strict=True))
    return peers.sum([float(not same)])[0] == 0


def _from(peers: Collective, source: int, columns: dict[str, Tensor]) -> Batch:
    """Return the part of trainer `source`."""
    names = sorted(columns)
    held = [columns[name].clone(memory_format=torch.contiguous_format) for name in names]
    peers.broadcast_(held, source)
    return dict(zip(names, held, strict=True))


def _length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in tensors))
