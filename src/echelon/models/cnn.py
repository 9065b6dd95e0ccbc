"""A convolutional network like LeNet (LeCun et al. 1998).

Convolutions, each followed by pooling, which halves the image; then dense layers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from torch import nn

from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError
from echelon.models.layers import (
    ActivationName,
    Images,
    InitName,
    NormName,
    Rate,
    Sizes,
    activation,
    chain,
    dense_block,
    initialise_,
    norm,
)
from echelon.models.registry import InputFacts


class CNNOptions(Section):
    """Convolutions, then dense layers."""

    channels: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (32, 64)
    """Channels of each convolution; each is followed by pooling, which halves the image."""
    kernel: PositiveInt = 5
    """Side of the window that a convolution sees."""
    padding: Literal["same", "valid"] = "same"
    """Whether windows may reach over the edge."""
    hidden: Sizes = (128,)
    """Width of each dense layer."""
    activation: ActivationName = "relu"
    norm: NormName = "none"
    dropout: Rate = 0.0
    """Part of each dense layer's values that training leaves out."""
    init: InitName = "he"


class CNN(nn.Sequential):
    """Images → convolutions → dense layers → a score per output."""

    def __init__(self, image: tuple[int, int, int], outputs: int, options: CNNOptions) -> None:
        o = options
        colors, height, width = image
        depths = [colors, *o.channels]
        widths = [depths[-1] * _left(height, o) * _left(width, o), *o.hidden]
        super().__init__(
            Images(),
            *(_convolution(before, after, o) for before, after in pairwise(depths)),
            nn.Flatten(),
            *(dense_block(a, b, o.activation, o.norm, o.dropout) for a, b in pairwise(widths)),
            nn.Linear(widths[-1], outputs),
        )
        initialise_(self, o.init, o.activation)


def _convolution(before: int, after: int, o: CNNOptions) -> nn.Sequential:
    bias = o.norm != "batch"
    shape, pool = activation(o.activation), nn.MaxPool2d(2)
    # An activation that never falls commutes with the maximum: pooling first gives the same values
    # and leaves the activation a quarter of the work. GELU falls for some negative values.
    last = (shape, pool) if o.activation == "gelu" else (pool, shape)
    return chain(
        nn.Conv2d(before, after, o.kernel, padding=o.padding, bias=bias),
        norm(o.norm, after, images=True),
        *last,
    )


def _left(side: int, o: CNNOptions) -> int:
    """Return the side of an image after all convolutions; refuse an image that is too small."""
    left = side
    for _ in o.channels:
        left = (left if o.padding == "same" else left - o.kernel + 1) // 2
        if left < 1:
            raise ConfigError(
                f"model.channels: {len(o.channels)} convolutions with pooling leave nothing of an "
                f"image side of {side}: take fewer, or a smaller kernel",
                path=("model", "channels"),
            )
    return left


Options = CNNOptions


def from_facts(options: CNNOptions, facts: InputFacts) -> CNN:
    return CNN(facts.image, facts.outputs, options)
