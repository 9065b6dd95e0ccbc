"""The three networks, as plain torch modules; `keras_models` has the same ones for Keras."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    """30 → 64 → 2, the size of a small table."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))


def cnn() -> nn.Module:
    """LeNet's shape on 28 × 28 grey images, with the layers people use in it today.

    Pooling stands before relu, as in Echelon's own cnn: the same function, and less to do.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        out: Tensor = x + self.feed(self.norm2(x))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_BHLE = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed_BHLE.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """A character model: 4 layers of width 256 over 128 characters."""

    def __init__(
        self, vocabulary: int, length: int = 128, width: int = 256, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, token: Tensor) -> Tensor:
        place_L = torch.arange(token.shape[1], device=token.device)
        x_BLD = self.token(token) + self.place(place_L)
        out: Tensor = self.head(self.norm(self.blocks(x_BLD)))
        return out
