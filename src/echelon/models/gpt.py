"""GPT: a transformer that predicts the next token (Radford et al. 2019, in nanoGPT's form).

Shapes: B texts, L tokens, D numbers per token, H heads of K = D / H numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError, TaskError
from echelon.models.layers import NORMAL_STD, Rate
from echelon.models.registry import InputFacts


class GPTOptions(Section):
    """Size of the transformer. Its context is the length of the data's samples."""

    layers: PositiveInt = 4
    heads: PositiveInt = 4
    width: PositiveInt = 128
    """Numbers per token; must be a multiple of `heads`."""
    dropout: Rate = 0.0
    bias: bool = True
    """Whether linear layers and norms have a bias."""
    tied: bool = True
    """Whether tokens are read and written with the same table."""


class GPT(nn.Sequential):
    """Tokens [B, L] → scores of the token that follows each of them [B, L, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, options: GPTOptions) -> None:
        o = options
        if o.width % o.heads:
            raise ConfigError(
                f"model.width = {o.width}: must be a multiple of model.heads ({o.heads})",
                path=("model", "width"),
            )
        embed, head = Embed(vocabulary, context, o), Head(vocabulary, o)
        super().__init__(embed, *(Block(o) for _ in range(o.layers)), head)
        self.context = context
        self._initialise(o)
        if o.tied:
            head.scores.weight = embed.tokens.weight

    def _initialise(self, o: GPTOptions) -> None:
        """As GPT-2: what is added to the residual stream is smaller the more layers add to it."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("out.weight"):
                nn.init.normal_(parameter, std=NORMAL_STD * (2 * o.layers) ** -0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=NORMAL_STD)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` [B, L] followed by `count` more, each drawn from the model; 0 takes the best."""
        for _ in range(count):
            scores = self(tokens[:, -self.context :])[:, -1].float()
            if temperature == 0:
                following = scores.argmax(-1, keepdim=True)
            else:
                chances = (scores / temperature).softmax(-1)
                following = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


class Embed(nn.Module):
    """A vector for each token plus a vector for its place."""

    def __init__(self, vocabulary: int, context: int, o: GPTOptions) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, o.width)
        self.places = nn.Embedding(context, o.width)
        self.dropout = nn.Dropout(o.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], self.places.num_embeddings
        if length > context:
            raise TaskError(f"gpt sees {context} tokens at once: a text of {length} is too long")
        x: Tensor = self.dropout(self.tokens(tokens) + self.places.weight[:length])
        return x


class Block(nn.Module):
    """Tokens look at each other, then each thinks for itself; both only add to what is there."""

    def __init__(self, o: GPTOptions) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(o.width, bias=o.bias)
        self.attention = Attention(o)
        self.norm2 = nn.LayerNorm(o.width, bias=o.bias)
        self.mlp = FeedForward(o)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Attention(nn.Module):
    """Every token gathers from itself and those before it, by several heads at once."""

    def __init__(self, o: GPTOptions) -> None:
        super().__init__()
        self.heads = o.heads
        self.qkv = nn.Linear(o.width, 3 * o.width, bias=o.bias)
        self.out = nn.Linear(o.width, o.width, bias=o.bias)
        self.dropout = nn.Dropout(o.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        qkv, K = self.qkv(x), D // self.heads
        H = qkv.shape[-1] // (3 * K)  # all heads, or those of them that lie here
        q, k, v = qkv.view(B, L, 3, H, K).unbind(2)
        y_BHLK = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=True,
        )
        y: Tensor = self.dropout(self.out(y_BHLK.transpose(1, 2).reshape(B, L, H * K)))
        return y


class FeedForward(nn.Module):
    """Four times wider, a bend, and back."""

    def __init__(self, o: GPTOptions) -> None:
        super().__init__()
        self.up = nn.Linear(o.width, 4 * o.width, bias=o.bias)
        self.out = nn.Linear(4 * o.width, o.width, bias=o.bias)
        self.dropout = nn.Dropout(o.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.out(F.gelu(self.up(x))))
        return y


class Head(nn.Module):
    """A score for every token that may follow."""

    def __init__(self, vocabulary: int, o: GPTOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(o.width, bias=o.bias)
        self.scores = nn.Linear(o.width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(x))
        return scores


Options = GPTOptions


def from_facts(options: GPTOptions, facts: InputFacts) -> GPT:
    assert facts.vocabulary is not None, "the registry checks this"
    return GPT(facts.vocabulary, facts.shape[0], options)
