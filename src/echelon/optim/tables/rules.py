"""Row-wise update rules, and the first values of rows.

Gradients have one row per slot, and slots are distinct. sgd keeps nothing; adagrad keeps one number
per row, the sum of its gradients' mean squares; adam keeps its running mean in full, and one number
for the mean square. Adam counts the updates of each row by itself: a row that is seen for the first
time late in a run moves as far as the first rows did.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.hashing import Words, key, words
from echelon.core.types import RowRule
from echelon.optim.tables.index import Column

_NUMBER = Column(torch.float32)
_PIECE = 1 << 18
"""Bytes of rows that are changed at a time, so that they stay in the cache."""


def state_columns(rule: RowRule, width: int) -> dict[str, Column]:
    """Return what a rule keeps for each row, by name."""
    match rule.name:
        case "sgd":
            return {}
        case "adagrad":
            return {"square": _NUMBER}
        case "adam":
            return {"mean": Column(torch.float32, width), "square": _NUMBER, "steps": _NUMBER}


@torch.no_grad()
def apply_(
    rule: RowRule,
    memory: Mapping[str, Tensor],
    slots: Tensor,
    grads: Tensor,
    factor: float,
    scale: float = 1.0,
) -> None:
    """Update the rows at these slots with `scale` · `grads`, at `factor` times the rule's rate."""
    rows, rate = memory["rows"], rule.lr * factor
    if is_penalised(rule) or (scale != 1 and rule.name == "adam"):
        grads, scale = grads * scale, 1.0
        _penalise_(rule, rows, slots, grads, rate)
    match rule.name:
        case "sgd":
            steps = grads.new_full((len(slots),), -rate * scale)
        case "adagrad":
            steps = _adagrad(rule, memory, slots, grads, -rate, scale)
        case "adam":
            grads, steps = _adam(rule, memory, slots, grads, -rate)
    _add(rows, slots, grads, steps)


def is_penalised(rule: RowRule) -> bool:
    return bool(rule.l1 or rule.l2 or rule.weight_decay)


def _penalise_(rule: RowRule, rows: Tensor, slots: Tensor, grads: Tensor, rate: float) -> None:
    """Add l2·w and l1·sign(w) to the gradients, and shrink the rows by decay, as
    `optim.build.penalise_` does for dense parameters."""
    if not is_penalised(rule):
        return
    own = rows.index_select(0, slots)
    if rule.l2:
        grads.add_(own, alpha=rule.l2)
    if rule.l1:
        grads.add_(own.sign(), alpha=rule.l1)
    if rule.weight_decay:
        rows.index_add_(0, slots, own.mul_(-rate * rule.weight_decay))


def _adagrad(
    rule: RowRule,
    memory: Mapping[str, Tensor],
    slots: Tensor,
    grads: Tensor,
    rate: float,
    scale: float,
) -> Tensor:
    """Update the sums of squares, and return the step of each row.

    The scale multiplies these steps, one number per row, and not the gradients.
    """
    found = _mean_square(grads).mul_(scale * scale)
    square = memory["square"].index_select(0, slots).add_(found)
    _write(memory["square"], slots, square)
    return square.sqrt_().add_(rule.eps).reciprocal_().mul_(rate * scale)


def _adam(
    rule: RowRule, memory: Mapping[str, Tensor], slots: Tensor, grads: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Update the running means, and return the mean and the step of each row."""
    first, second = rule.betas
    steps = memory["steps"].index_select(0, slots).add_(1)
    square = memory["square"].index_select(0, slots).lerp_(_mean_square(grads), 1 - second)
    mean = memory["mean"].index_select(0, slots).lerp_(grads, 1 - first)
    for name, value in (("steps", steps), ("square", square), ("mean", mean)):
        _write(memory[name], slots, value)
    size = square.div_(1 - second**steps).sqrt_().add_(rule.eps).mul_(1 - first**steps)
    return mean, size.reciprocal_().mul_(rate)


def _add(rows: Tensor, slots: Tensor, values: Tensor, steps: Tensor) -> None:
    """Do `rows[slots] += values * steps`, a piece at a time that stays in the cache.

    `index_add_` takes half as long again. The values, which may be another process's memory, are
    only read.
    """
    size = max(1, _PIECE // rows[:1].nbytes)
    new = torch.empty(size, rows.shape[1])
    whole, written = _wide(rows), _wide(new)
    pieces = (slots.split(size), values.split(size), steps.unsqueeze(1).split(size))
    for here, value, step in zip(*pieces, strict=True):
        at = here.numpy()
        if at.size < size:  # the last piece
            new, written = new[: at.size], written[: at.size]
        whole.take(at, out=written, mode="clip")  # "raise" would take a detour
        new.addcmul_(value, step)
        whole[at] = written


def _wide(rows: Tensor) -> NDArray[np.void]:
    """View each row as a single item: NumPy copies those in half the time."""
    return rows.numpy().view(np.dtype((np.void, rows[:1].nbytes))).reshape(-1)


def _mean_square(grads: Tensor) -> Tensor:
    """Return the mean square of each row. NumPy does it in one pass, in half of torch's time."""
    values = grads.numpy()
    return torch.from_numpy(np.einsum("ij,ij->i", values, values)).div_(grads.shape[1])


def _write(column: Tensor, slots: Tensor, values: Tensor) -> None:
    """Do `column[slots] = values`, in a third of the time of `index_copy_`."""
    column.numpy()[slots.numpy()] = values.numpy()


# First values of rows

_BLOCK = 1 << 13
_UNIT = np.float32(2.0**-23)


class Initial:
    """First values of rows: uniform around 0, with standard deviation `std`.

    They are a pure function of seed, table and id. So they do not depend on which trainer sees an
    id first, nor on how many servers share the table, and a row can be read before it is made.
    """

    def __init__(self, seed: int, table: str, width: int, std: float) -> None:
        self._key = key(seed, zlib.crc32(table.encode()), len(table))
        self._width = width
        self._bound = np.float32(std * 3**0.5)
        self._lanes = np.arange(-(-width // 2), dtype=np.uint64)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the first values of these rows, [n, width]."""
        out = torch.zeros(len(ids), self._width)
        if self._bound:
            starts = words(ids.numpy().view(np.uint64), self._key)
            step = max(1, _BLOCK // len(self._lanes))
            for at in range(0, len(ids), step):
                self._fill(out[at : at + step].numpy(), starts[at : at + step])
        return out

    def _fill(self, out: np.ndarray[tuple[int, ...], np.dtype[np.float32]], starts: Words) -> None:
        """Fill rows of `out`, two numbers of 24 bits from every random word."""
        drawn = words((starts[:, None] + self._lanes).reshape(-1), self._key)
        bits = drawn.view(np.uint32).reshape(len(starts), -1)[:, : self._width]
        np.multiply(bits >> np.uint32(8), _UNIT, out=out, casting="unsafe")
        out -= np.float32(1.0)
        out *= self._bound
