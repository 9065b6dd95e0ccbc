"""Residual networks (He et al. 2015): each block learns a correction that is added to its input.

Stages of 64, 128, 256 and 512 channels; each but the first halves the image. Up to depth 34 a block
is two 3×3 convolutions; beyond, a 3×3 between two 1×1 that reduce and restore the channels.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from echelon.core.config.sections import Section
from echelon.models.layers import (
    ActivationName,
    Images,
    InitName,
    NormName,
    Rate,
    activation,
    chain,
    dropout,
    initialise_,
    norm,
)
from echelon.models.registry import InputFacts

Depth = Literal[18, 34, 50, 101, 152]
BLOCKS: dict[Depth, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
SMALL = 64


class ResNetOptions(Section):
    """How deep, and how it starts."""

    depth: Depth = 18
    """Layers with weights."""
    stem: Literal["auto", "large", "small"] = "auto"
    """`large` shrinks the image to a quarter at once, `small` not at all (up to 64 pixels)."""
    activation: ActivationName = "relu"
    norm: NormName = "batch"
    dropout: Rate = 0.0
    """Part of the last layer's inputs that training leaves out."""
    init: InitName = "he"


class ResNet(nn.Sequential):
    """Images → stem → residual blocks → mean over places → a score per output."""

    def __init__(self, image: tuple[int, int, int], outputs: int, options: ResNetOptions) -> None:
        o = options
        colors, *sides = image
        small = o.stem == "small" or (o.stem == "auto" and max(sides) <= SMALL)
        blocks = [_stem(colors, small, o)]
        channels = 64
        for stage, count in enumerate(BLOCKS[o.depth]):
            for at in range(count):
                stride = 2 if stage > 0 and at == 0 else 1
                block = Residual(channels, 64 * 2**stage, stride, o)
                blocks.append(block)
                channels = block.channels
        mean = chain(nn.AdaptiveAvgPool2d(1), nn.Flatten(), dropout(o.dropout))
        super().__init__(Images(), *blocks, mean, nn.Linear(channels, outputs))
        initialise_(self, o.init, o.activation)


class Residual(nn.Module):
    """x → activation(shortcut(x) + body(x))."""

    def __init__(self, before: int, width: int, stride: int, o: ResNetOptions) -> None:
        super().__init__()
        if o.depth < 50:
            self.channels = width
            layers = [(before, width, 3, stride), (width, width, 3, 1)]
        else:
            self.channels = 4 * width
            layers = [
                (before, width, 1, 1),
                (width, width, 3, stride),
                (width, self.channels, 1, 1),
            ]
        *inner, last = layers
        self.body = chain(
            *(chain(_convolution(*sizes, o), activation(o.activation)) for sizes in inner),
            _convolution(*last, o),
        )
        same = before == self.channels and stride == 1
        self.shortcut = None if same else _convolution(before, self.channels, 1, stride, o)
        self.activation = activation(o.activation)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        y: Tensor = self.activation(self.body(x) + kept)
        return y


def _stem(colors: int, small: bool, o: ResNetOptions) -> nn.Module:
    if small:
        return chain(_convolution(colors, 64, 3, 1, o), activation(o.activation))
    pool = nn.MaxPool2d(3, 2, padding=1)
    return chain(_convolution(colors, 64, 7, 2, o), activation(o.activation), pool)


def _convolution(
    before: int, after: int, kernel: int, stride: int, o: ResNetOptions
) -> nn.Sequential:
    bias = o.norm == "none"
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=bias)
    return chain(convolution, norm(o.norm, after, images=True))


Options = ResNetOptions


def from_facts(options: ResNetOptions, facts: InputFacts) -> ResNet:
    return ResNet(facts.image, facts.outputs, options)
