"""A convolution over texts of which only the strongest match of each pattern counts.

    forward    every window of the text × every pattern ─▶ the maximum over the windows
    backward   the one window that won, per text and pattern: a few rows of vectors and weights

Torch's own backward goes through all windows, with zeros for those that lost. On a CPU the rows of
the winners are added up instead: a step of the whole network takes about half the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class StrongestMatch(nn.Conv1d):
    """Vectors [B, width, L] → how strongly each pattern matches anywhere [B, filters].

    Every text gets a whole window of zeros before and after it.
    """

    def __init__(self, width: int, filters: int, size: int) -> None:
        super().__init__(width, filters, size, padding=size)

    def forward(self, vectors: Tensor) -> Tensor:
        if not _is_plain(vectors, self.weight):
            return super().forward(vectors).max(dim=-1).values
        best: Tensor = _Strongest.apply(vectors, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return best


def _is_plain(vectors: Tensor, weight: Tensor) -> bool:
    """Float32 on a CPU: there adding up rows is faster than a convolution."""
    return (
        vectors.device.type == "cpu"
        and vectors.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


class _Strongest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        matches = F.conv1d(vectors, weight, bias, padding=weight.shape[-1])
        best, at = matches.max(dim=-1)
        ctx.save_for_backward(vectors, weight, at)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        vectors, weight, at = ctx.saved_tensors
        size = weight.shape[-1]
        words = F.pad(vectors.transpose(1, 2), (0, 0, size, size))
        first = at + torch.arange(len(at))[:, None] * words.shape[1]
        of_words = of_weight = None
        if ctx.needs_input_grad[0]:
            padded = _of_words(grad, first, weight, words.shape)
            of_words = padded[:, size:-size].transpose(1, 2)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(grad, first, words.flatten(0, 1), size)
        return of_words, of_weight, grad.sum(0)


def _of_weight(grad: Tensor, first: Tensor, words: Tensor, size: int) -> Tensor:
    """Of each place in a pattern: the words that stood there in the windows that won."""
    places = first.t()[:, None] + torch.arange(size)[:, None]
    shares = grad.t()[:, None].expand(places.shape)
    rows = F.embedding_bag(
        places.flatten(0, 1), words, mode="sum", per_sample_weights=shares.flatten(0, 1)
    )
    return rows.view(-1, size, words.shape[-1]).transpose(1, 2)


def _of_words(grad: Tensor, first: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Of each word: the places of patterns that saw it in a window that won."""
    filters, width, size = weight.shape
    text, pattern = grad.nonzero(as_tuple=True)  # dropout and relu leave less than half
    inside = torch.arange(size)
    places = (first[text, pattern][:, None] + inside).flatten()
    rows = (pattern[:, None] * size + inside).flatten()
    shares = grad[text, pattern].repeat_interleave(size)
    places, order = places.sort(stable=True)
    ends = torch.bincount(places, minlength=shape[0] * shape[1]).cumsum(0)
    found = F.embedding_bag(
        rows[order],
        weight.transpose(1, 2).reshape(filters * size, width),
        F.pad(ends, (1, 0)),
        mode="sum",
        per_sample_weights=shares[order],
        include_last_offset=True,
    )
    return found.view(shape)
